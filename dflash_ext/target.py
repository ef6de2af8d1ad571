"""The frozen target: a transformers causal LM, read at a few decoder layers ("taps").

Taps are forward hooks on the decoder layers, so nothing here depends on how a transformers
release builds a model's forward. Shapes: T packed tokens, K taps, Ht target hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_ext.acceleration import accelerate
from dflash_ext.batch import PackedBatch
from dflash_ext.errors import UserError
from dflash_ext.fp8 import check_device, quantise_layers
from dflash_ext.mask_token import named_token_ids, resolve_mask_token_id
from dflash_ext.mixture import is_mixture
from dflash_ext.packing import Packing, packed, packed_inputs
from dflash_ext.placement import to_device
from dflash_ext.plan import plan_subbatches
from dflash_ext.shield import shield
from dflash_ext.taps import chosen_taps
from dflash_ext.target_loading import (
    WHOLE,
    Absent,
    Needs,
    decoder_layers,
    draw_weights,
    load_tokenizer,
    load_weights,
)
from dflash_ext.transfer import FeatureBatch, with_last_layer
from dflash_ext.transformers_api import (
    cache_argument,
    choose_experts,
    last_logits_only,
    layer_types,
    sliding_window,
)

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Vocabulary(NamedTuple):
    """What drafter and target share, frozen."""

    embedding: Tensor
    """[Ve, Ht]: row i is what the target's embedding module returns for token i (Gemma scales)."""
    head: Tensor
    """[V, Ht], V <= Ve: a vocabulary padded on the head's side only is cut to what can be read."""


class _LastTapReached(Exception):
    """Raised by the hook of the last tap: nothing after it is needed."""


@dataclass(frozen=True)
class _Capture:
    """Where one tapped forward of one thread leaves its taps."""

    out: Tensor
    """[T, K*Ht]"""
    taps: tuple[int, ...]
    """Whose states they are, Ht columns each; the same tap may be there twice."""
    stop: int | None = None
    """The tap after which the forward ends."""
    rows: tuple[Tensor, Tensor] | None = None
    """int64 [t] each: rows of the forward, and of `out`, where they go. None: all, in order."""

    def take(self, tap: int, states: Tensor) -> None:
        """states [t, Ht]: all rows of the forward."""
        width = states.shape[1]
        for i in (i for i, wanted in enumerate(self.taps) if wanted == tap):
            into = self.out[:, i * width : (i + 1) * width]
            # Copies, so that an in-place operation of a later layer cannot reach them.
            if self.rows is None:
                into.copy_(states)
            else:
                source = self.rows[0].to(states.device)  # of a split target, not always out's
                into.index_copy_(0, self.rows[1], states[source].to(into.device))


class Target:
    """A frozen causal LM with taps. Use `Target.load`, or wrap a model already in memory."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        tap_ids: Sequence[int] | None = None,
        path: str = "",
        accelerated: bool = True,
    ) -> None:
        """`model`: transformers causal LM in bf16 or fp32. UserError for fp16 or a wrong tap id.

        accelerated: `features` runs on our kernels as far as that agrees with the model
        (acceleration.py), otherwise as transformers runs it. The model is kept out of other
        threads' FX tracing (shield.py).
        """
        self.model = model.eval().requires_grad_(False)
        shield(model)
        choose_experts(model)
        self.path = path or getattr(model.config, "_name_or_path", "")
        self._tokenizer = tokenizer
        text_config = model.config.get_text_config()
        self.num_layers: int = text_config.num_hidden_layers
        self.hidden_size: int = text_config.hidden_size
        self.tap_ids = chosen_taps(tap_ids, self.num_layers)
        embedding = model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        if self.dtype not in DTYPES.values():
            raise UserError(
                f"target in {self.dtype} is not supported: use bf16 or fp32 "
                "(fp16 overflows on the outliers of hidden states)"
            )
        self.devices: tuple[torch.device, ...] = (self.device,)
        """Those that its decoder layers are spread over."""
        self._vocabulary: Vocabulary | None = None
        self._local = threading.local()
        self._cache_argument = cache_argument(model)
        self._last_logits_only = last_logits_only(model)
        self._layers = decoder_layers(model, self.num_layers)
        self.handed_taps = self.tap_ids
        """Taps of a feature batch."""
        for tap in self.tap_ids:
            self._layers[tap].register_forward_hook(self._hook(tap))
        name = repr(self.path or type(model).__name__)
        tapped = self._layers[: max(self.tap_ids) + 1]
        self.acceleration = (
            accelerate(name, model, list(self._layers), text_config, self._states)
            if accelerated and not any(isinstance(layer, Absent) for layer in tapped)
            else None
        )

    def keep(self, needs: Needs) -> None:
        """Let go of the decoder layers that these needs do not include."""
        kept = needs.layers(self.num_layers, self.tap_ids)
        loaded = [i for i, layer in enumerate(self._layers) if not isinstance(layer, Absent)]
        if gone := [i for i in loaded if i not in kept]:
            with self._other_modules():
                for i in gone:
                    self._layers[i] = Absent(f"decoder layer {i}", self._layers[i])

    @contextmanager
    def _other_modules(self) -> Iterator[None]:
        """Within: modules of the decoder layers may be exchanged. What they do must not change."""
        if self.acceleration is not None:
            self.acceleration.remove()
        try:
            yield
        finally:  # `features` goes by `acceleration`, so the two must not come apart
            shield(self.model)
            if self.acceleration is not None:
                self.acceleration = self.acceleration.again(list(self._layers))

    def hand_over_last_layer(self) -> None:
        """Give every feature batch one tap more, at its end: the last layer's output.

        Once; no forward of `features` ends before that layer then.
        """
        if self.num_layers - 1 not in self.tap_ids:
            self._layers[-1].register_forward_hook(self._hook(self.num_layers - 1))
        self.handed_taps = with_last_layer(self.tap_ids, self.num_layers)

    def quantise(self) -> None:
        """Compute the products of decoder layers in FP8 from here on (fp8.py); not to be undone.

        UserError unless the target is in bf16, on a device that can, and has such products.
        """
        if self.dtype != torch.bfloat16:
            raise UserError(f"--target.fp8 needs a target in bf16, this one is in {self.dtype}")
        check_device(self.device)
        with self._other_modules():
            kind = self.model.config.get_text_config().model_type
            count = quantise_layers(self._layers, partial(is_mixture, model_type=kind))
        if count == 0:
            raise UserError(f"target {self.path!r} has no products that could be in FP8")
        log.info("target %r: %d products in FP8", self.path, count)

    @classmethod
    def load(
        cls,
        path_or_id: str | Path,
        *,
        device: str | torch.device | list[torch.device] = "cpu",
        dtype: str | torch.dtype = torch.float32,
        tap_ids: Sequence[int] | None = None,
        trust_remote_code: bool = False,
        needs: Needs = WHOLE,
        random_weights: bool = False,
        accelerated: bool = True,
    ) -> Target:
        """Load a local directory or hub id. dtype: bf16 or fp32; tap_ids None: `default_tap_ids`.

        device: or several, over which the decoder layers are spread evenly; what the target takes
        and gives is on the first one. needs: what of it is loaded at all. random_weights: only the
        config is read; each weight is drawn by its name, the same whatever else is loaded, and
        there is no tokenizer. accelerated: as for `Target`; whoever only decodes needs none.
        UserError if it cannot be loaded, lacks a weight, would need to run its own code, is fp16,
        or `device` is no GPU of this machine.
        """
        resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if resolved is None or resolved not in DTYPES.values():
            raise UserError(f"target dtype {dtype} is not supported: use one of {list(DTYPES)}")
        places = [torch.device(d) for d in (device if isinstance(device, list) else [device])]
        gpus = torch.cuda.device_count()
        for place in places:
            if place.type == "cuda" and (place.index or 0) >= gpus:
                raise UserError(f"device '{place}' is not available: torch sees {gpus} GPUs")
        name = str(path_or_id)
        load = draw_weights if random_weights else load_weights
        model = load(
            name,
            resolved,
            places,
            needs=needs,
            taps=lambda layers: chosen_taps(tap_ids, layers),
            trust_remote_code=trust_remote_code,
        )
        tokenizer = None if random_weights else load_tokenizer(name, trust_remote_code)
        target = cls(model, tokenizer, tap_ids=tap_ids, path=name, accelerated=accelerated)
        target.devices = (target.device, *places[1:])
        return target

    @property
    def whole(self) -> bool:
        """Is all of it loaded, so that it can decode?"""
        return not any(isinstance(module, Absent) for module in self.model.modules())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; UserError if the target came without one."""
        if self._tokenizer is None:
            raise UserError(
                f"target {self.path!r} has no tokenizer: expected its files beside the weights"
            )
        return self._tokenizer

    @property
    def embedding_rows(self) -> int:
        """Tokens the target can read."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def vocab_size(self) -> int:
        """Tokens the target can both read and predict (rows of `vocabulary().head`)."""
        return self.vocabulary().head.shape[0]

    @property
    def stop_ids(self) -> frozenset[int]:
        """End-of-turn tokens: the model's, its generation config's and the tokenizer's."""
        generation = getattr(self.model, "generation_config", None)
        sources = (self.model.config, generation, self._tokenizer)
        return frozenset(named_token_ids(("eos_token_id",), *sources))

    def mask_token_id(self, explicit: int | None = None) -> int:
        """`resolve_mask_token_id` for this target."""
        return resolve_mask_token_id(
            explicit, self._tokenizer, self.model.config, self.embedding_rows
        )

    @torch.no_grad()
    def vocabulary(self) -> Vocabulary:
        """Frozen embedding and head; views of the model's weights unless its embedding scales."""
        if self._vocabulary is None:
            module, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
            if isinstance(head, Absent):
                head.refuse()
            if head is None or getattr(head, "bias", None) is not None:
                raise UserError(
                    f"target {type(self.model).__name__}: expected an lm_head without bias"
                )
            embedding = module.weight
            # Some embedding modules scale what they look up (Gemma): ask, whatever their class.
            few = torch.arange(min(8, embedding.shape[0]), device=embedding.device)
            if not torch.equal(module(few), embedding[few]):
                embedding = module(torch.arange(embedding.shape[0], device=embedding.device))
            self._vocabulary = Vocabulary(
                embedding.detach(), head.weight.detach()[: embedding.shape[0]]
            )
        return self._vocabulary

    def _hook(self, tap: int) -> Callable[..., None]:
        # Not `self`: the model would hold what holds it, and stay on its device when let go.
        local, width = self._local, self.hidden_size

        def take(_module: nn.Module, _args: Any, output: Any) -> None:
            capture: _Capture | None = getattr(local, "capture", None)
            if capture is None:  # another use of the model, or another thread
                return
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.dim() != 3 or hidden.shape[-1] != width:
                raise UserError(
                    f"decoder layer {tap}: expected output [batch, length, {width}], "
                    f"got {tuple(hidden.shape)}; this kind of target is not supported"
                )
            capture.take(tap, hidden.reshape(-1, width))
            if tap == capture.stop:
                raise _LastTapReached

        return take

    def _run(self, capture: _Capture | None, **inputs: Any) -> Any:
        """One forward with `capture` active in this thread; None if it stopped at the last tap."""
        self._local.capture = capture
        try:
            return self.model(**inputs)
        except _LastTapReached:
            return None
        finally:
            self._local.capture = None

    def features(self, batch: PackedBatch) -> FeatureBatch:
        """Taps of every token, [T, K*Ht] in the model's dtype, in packed order.

        One forward without padding where the target's acceleration has that.
        """
        states = self._states(batch, packed=self.acceleration is not None)
        return FeatureBatch(
            states, self.handed_taps, batch.sample_ids, batch.token_hash(), batch.num_tokens
        )

    @torch.no_grad()
    def _states(self, batch: PackedBatch, packed: bool) -> Tensor:
        """[T, K*Ht], of one packed forward, or of padded ones."""
        capture = self._capture(batch.num_tokens, self.handed_taps, stop=max(self.handed_taps))
        (self._run_packed if packed else self._run_padded)(batch, capture)
        return capture.out

    def _capture(self, rows: int, taps: tuple[int, ...], stop: int | None = None) -> _Capture:
        width = len(taps) * self.hidden_size
        out = torch.empty(rows, width, device=self.device, dtype=self.dtype)
        return _Capture(out, taps, stop)

    def _run_packed(self, batch: PackedBatch, capture: _Capture) -> None:
        ids, positions = (to_device(x, self.device) for x in (batch.input_ids, batch.positions()))
        with packed(Packing(batch.doc_starts)):
            self._run(capture, **packed_inputs(ids, positions))

    def _run_padded(self, batch: PackedBatch, capture: _Capture) -> None:
        """Documents of similar length share a right-padded forward.

        Padding needs no attention mask: a causal row never sees what stands to its right, and rows
        of padding are dropped.
        """
        lengths, starts = batch.lengths().tolist(), batch.doc_starts.tolist()
        # One more forward costs about as much as this many tokens (kernel launches on a GPU).
        overhead = 512 if self.device.type == "cuda" else 32
        for docs in plan_subbatches(lengths, overhead):
            longest = lengths[docs[0]]
            ids = torch.zeros(len(docs), longest, dtype=torch.int64)
            for row, doc in enumerate(docs):
                ids[row, : lengths[doc]] = batch.input_ids[starts[doc] : starts[doc + 1]]
            into = torch.cat([torch.arange(starts[d], starts[d + 1]) for d in docs])
            source = torch.cat([torch.arange(lengths[d]) + r * longest for r, d in enumerate(docs)])
            rows = to_device(source, self.device), to_device(into, self.device)
            self._run(
                replace(capture, rows=rows),
                input_ids=to_device(ids, self.device),
                position_ids=torch.arange(longest, device=self.device).expand(len(docs), -1),
                use_cache=False,
            )

    @property
    def layer_types(self) -> set[str]:
        """Kinds of state its decoder layers keep, by transformers' names."""
        return set(layer_types(self.model.config.get_text_config()))

    @property
    def window(self) -> int | None:
        """Positions that a sliding layer sees, its own included; None if no layer slides."""
        return sliding_window(self.model.config.get_text_config())

    @torch.no_grad()
    def forward_with_taps(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: Any,
        *,
        mask: Any = None,
        last_only: bool = False,
        taps: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Extend `cache` by n tokens of each of R sequences.

        input_ids, positions int64 [R, n] on the target's device; mask as transformers takes it,
        None: causal -> logits [R, n, V] ([R, 1, V] if `last_only`) and features [R * n, K*Ht] (None
        without `taps`). V may be cut as in `vocabulary`.
        """
        keywords: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if mask is not None:
            keywords["attention_mask"] = mask
        if last_only:
            keywords |= self._last_logits_only
        capture = self._capture(input_ids.numel(), self.tap_ids) if taps else None
        output = self._run(capture, input_ids=input_ids, position_ids=positions, **keywords)
        logits = output.logits[:, -1:] if last_only else output.logits
        return logits[..., : self.vocab_size], None if capture is None else capture.out
