"""A worker extension that takes the same states out of a model in two ways."""

import torch
from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension


class AuxStatesExtension(HiddenStatesWorkerExtension):
    """Keeps, of every step, what extract's hooks see and what patched vLLM hands to a draft."""

    def hand_out(self, layer_ids: list[int]) -> None:
        """Begin. The layers are set as vLLM's GPU runner sets them for a draft."""
        model = self.model_runner.model  # pyright: ignore[reportAttributeAccessIssue]
        self.steps: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._setup_hidden_states_capture(layer_ids)
        model.set_aux_hidden_state_layers(tuple(layer_ids))
        model.register_forward_hook(self._take_out)

    def _take_out(self, _model, _args, output):
        """The runner of the CPU expects the last state alone."""
        last, states = output
        self._handed_out = [state.clone() for state in states]
        return last

    def _file_step(self, scheduler_output) -> None:
        assert self._step_states is not None
        captured = [self._step_states[slot] for slot in range(len(self._layer_ids))]
        self.steps.append((captured, self._handed_out))
        super()._file_step(scheduler_output)

    def both(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rows of all steps, a tensor a layer: captured, handed out."""
        captured, handed_out = zip(*self.steps, strict=True)
        return _joined(captured), _joined(handed_out)


def _joined(steps: tuple[list[torch.Tensor], ...]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*steps, strict=True)]
