"""The benchmark of training by one process and several: that it runs, and leaves nothing but its figures."""

import json

from benchmarks import scaling


def test_it_trains_with_each_number_of_processes(tmp_path, capfd):
    flags = ["--tiny", "--tokens", "4096", "--epochs", "1", "--json", str(tmp_path / "figures.jsonl")]
    assert scaling.main(["--folder", str(tmp_path / "data"), *flags]) == 0
    (line,) = (tmp_path / "figures.jsonl").read_text().splitlines()
    runs = json.loads(line)["runs"]
    assert [run["processes"] for run in runs] == [1, 2]
    assert all(run["tokens_per_s"] > 0 and run["compiled_again"] == 0 for run in runs)
    assert capfd.readouterr().out.count("tok/s") == 2
    assert not list((tmp_path / "data").iterdir())


def test_without_room_it_ends_with_5(tmp_path, capfd):
    assert scaling.main(["--folder", str(tmp_path), "--tiny", "--tokens", str(10**15)]) == 5
    assert "GB free" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_left_alone(tmp_path, capfd):
    (tmp_path / "bench-scaling").mkdir()
    (tmp_path / "bench-scaling" / "mine").touch()
    assert scaling.main(["--folder", str(tmp_path), "--tiny"]) == 2
    assert "bench: --folder:" in capfd.readouterr().err
    assert (tmp_path / "bench-scaling" / "mine").exists()
