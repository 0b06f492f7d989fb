"""What the user zeroes of gradients that passes in ``no_sync()`` have left.

Such a pass leaves ``flat_param.grad`` unsharded, and aside of it, where no ``zero_grad()`` comes, the reduced shard of
earlier passes: ``_saved_grad_shard``, or ``_offloaded_grad``. torch adds that to the next gradient although the user
has zeroed his; and of a single gradient that he sets to None it zeroes the elements of another one.
"""

from collections.abc import Sequence

from torch import Tensor

from ..common.torch_private import HandleTrainingState
from .views import Views


class Zeroing(Views):
    """The part of FlatParamHandle that finds out what was zeroed."""

    # Offloading: the gradient of earlier backwards, and the version of `_cpu_grad` that holds it. torch keeps only the
    # last one when gradients are accumulated outside of no_sync()
    _offloaded_grad: tuple[Tensor, int] | None = None
    _versions_left_by_backward: Sequence[int | None] = ()  # of the gradients that the last one in no_sync() left
    _put_aside = False  # whether this backward has put the gradient of earlier ones aside

    def _drop_saved_grad_if_zeroed(self) -> None:
        """Drop the shard of earlier backwards if the user has zeroed the gradient since a backward in ``no_sync()``.

        That backward left an unsharded gradient in ``flat_param.grad`` and the shard in ``_saved_grad_shard``, where no
        ``zero_grad()`` comes: torch adds it to the next gradient. If the former is gone, or was changed to zeros, so is
        the latter. ``_post_backward_called`` says that there was one; a reduced backward resets it at its end.
        """
        flat_param = self.flat_param
        if not (flat_param._post_backward_called and self._keeps_grad_of_earlier_backwards()):
            return
        grad, left = flat_param.grad, self._versions_left_by_backward  # () where the user drives the steps himself
        pairs = zip(self._versions_of_grads(), left, strict=False)
        changed = [i for i, (version, before) in enumerate(pairs) if version != before]
        if grad is None or (changed and not grad.any()):
            self._offloaded_grad = None
            if hasattr(flat_param, "_saved_grad_shard"):
                del flat_param._saved_grad_shard
        elif changed and self._use_orig_params:
            views = list(self._get_unflat_views(grad))
            for i in changed:
                if not views[i].any():
                    self._zero_grad_of_earlier_backwards(i)

    def _give_back_unused_grad(self) -> None:
        """At the end of a backward in which no gradient came: the one of earlier backwards is the gradient again.

        torch leaves None, and forgets the earlier gradient if this backward was to reduce one. Original parameters
        have kept theirs.
        """
        self._put_aside = False
        flat_param = self.flat_param
        if self._use_orig_params or flat_param.grad is not None:
            return
        if self._offloaded_grad is not None:
            flat_param.grad, self._offloaded_grad = flat_param._cpu_grad, None
        elif hasattr(flat_param, "_saved_grad_shard"):
            flat_param.grad = flat_param._saved_grad_shard
            del flat_param._saved_grad_shard

    def _keeps_grad_of_earlier_backwards(self) -> bool:
        return self._offloaded_grad is not None or hasattr(self.flat_param, "_saved_grad_shard")

    def _note_grads_left_by_backward(self) -> None:
        """Remember what the gradients are that a backward leaves to the user; later versions are of his making."""
        if self._training_state == HandleTrainingState.BACKWARD_POST and self._keeps_grad_of_earlier_backwards():
            self._versions_left_by_backward = self._versions_of_grads()

    def _versions_of_grads(self) -> list[int | None]:
        flat_param = self.flat_param
        shown = flat_param._params if self._use_orig_params else (flat_param,)
        return [None if param.grad is None else param.grad._version for param in shown]

    def _grad_is_unsharded(self) -> bool:
        """Whether ``flat_param.grad`` is what passes in ``no_sync()`` left: of the whole unit, on every rank."""
        flat_param = self.flat_param
        if flat_param.grad is None or not self.uses_sharded_strategy or self._skipped_use_sharded_views:
            return False
        size = flat_param._unpadded_unsharded_size
        is_whole: bool = flat_param.grad.shape == size
        return is_whole and size != flat_param._sharded_size  # equal: one rank, its shard is all

    def _zero_dropped_grads(self) -> None:
        """Zero in the unsharded gradient what the user set to None, here or not in this rank's shard.

        torch zeros the elements that the parameter has in the *shard*, which here are of other parameters.
        """
        flat_param = self.flat_param
        dropped = [i for i, param in enumerate(flat_param._params) if param.grad is None]
        views = list(self._get_unflat_views(flat_param.grad)) if dropped else []
        for i in dropped:
            views[i].zero_()
            self._zero_grad_of_earlier_backwards(i)

    def _zero_grad_of_earlier_backwards(self, i: int) -> None:
        """Zero parameter ``i`` in the reduced gradient that lies aside while passes in ``no_sync()`` add up theirs."""
        piece = self.flat_param._shard_param_infos[i]
        offloaded = self._offloaded_grad
        for shard in (getattr(self.flat_param, "_saved_grad_shard", None), None if offloaded is None else offloaded[0]):
            if shard is not None and piece.in_shard:
                shard[piece.offset_in_shard : piece.offset_in_shard + piece.numel_in_shard].zero_()
