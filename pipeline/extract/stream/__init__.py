"""Engine `stream`: states go from the model to the shards inside the worker that computes them.

    work.py       what the worker is told, and how its errors come back
    engine.py     here: feeds samples to vLLM as one stream of requests, and hears which shards are written
    scheduler.py  in vLLM's engine process: which of them share a step
    worker.py     in the worker: hooks the decoder layers, knows whose rows a step computes
    ring.py       in the worker: takes a step's states off the GPU while the next one runs
    writer.py     in the worker: threads that put rows in their samples' places, check samples, write shards

Memory is bounded by the settings alone (bounds.py). GPU: one step's states, `stage_bytes`. Host: RING_STEPS steps,
pinned, and the shards in hand, `host_bytes`. A shard counts as in hand from its first sample's request to its record
on the disk; the feeder starts no shard beyond Work.shards_in_hand, so a slow disk starves the model of requests and
nothing piles up. In the worker nothing ever waits for the disk: a step waits for memory to be copied, at most.
"""
