"""Configuration: one dataclass per noun, validated on construction, two named recipes.

Fields left at None mean "decided from the target or the device"; train.py resolves them and saves
what it decided. The docstring under a field is its help text on the command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dflash_ext.blocks import resolve_gamma
from dflash_ext.drafter_rules import expand_layer_types
from dflash_ext.errors import UserError
from dflash_ext.loss import LossKind, check_loss, needs_teacher
from dflash_ext.ops.layout import BLOCK_SIZES

REQUIRED = "(yours to give)"
"""In a recipe: there is no default, the user's value is needed."""


def _at_least(owner: object, **minimum: float) -> None:
    for name, least in minimum.items():
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise UserError(f"{name} {value} must be a finite number of at least {least}")


@dataclass(frozen=True)
class TargetOptions:
    path: str | None = None
    """Directory or hub id of the target; none: the quickstart's SmolLM2-135M-Instruct."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the features; auto: bf16 on CUDA, fp32 on the CPU. Evaluation always decodes in fp32."""
    tap_ids: tuple[int, ...] | None = None
    """Decoder layers to tap; none: five, evenly spread."""
    fp8: bool = False
    """Capture from products in FP8, as an engine that serves the target in FP8 computes; a GPU of
    compute capability 9.0. Evaluation decodes in fp32 all the same."""
    mask_token_id: int | None = None
    """None: the family's known one, else the tokenizer's, else an unused row."""
    trust_remote_code: bool = False
    """Let the target's repository run its own code on this machine."""
    random_weights: bool = False
    """Read the shape only and draw the weights, on the device: for benchmarks and rehearsals."""
    devices: int = 1
    """GPUs of one target, neighbours, its decoder layers in order and evenly over them: for one
    that does not fit on one. Not where the target decodes."""

    def __post_init__(self) -> None:
        _at_least(self, devices=1)
        if self.fp8 and self.dtype == "fp32":
            raise UserError("--target.fp8 needs --target.dtype bf16 (or auto, on a GPU)")


@dataclass(frozen=True)
class DataOptions:
    train: str | None = None
    """A source of rows as for `python -m dflash_ext.prepare`, or a store that it made; none: the
    target writes and answers its own prompts."""
    validation: str | None = None
    """Rows or store held out, and not trained on where `train` has them as well; none: `held_out`
    rows of the training data."""
    held_out: int = 32
    """Rows taken from the training data for validation when no file is given."""
    max_length: int = 1024
    """Tokens kept of a file's conversation; a synthetic one is bounded by the two below."""
    synthetic_rows: int = 1000
    """Conversations the target writes when no file is given."""
    max_prompt_tokens: int = 64
    """Prompts the target does not end within this are dropped."""
    max_answer_tokens: int = 192
    """Longer answers are cut here."""
    synthesis_batch: int = 128
    """Conversations decoded side by side."""

    @property
    def longest(self) -> tuple[str, int]:
        """The options that bound a conversation, and its tokens (a synthetic one's without the
        template's)."""
        if self.train is None:
            both = self.max_prompt_tokens + self.max_answer_tokens
            return "max_prompt_tokens + max_answer_tokens", both
        return "max_length", self.max_length

    def __post_init__(self) -> None:
        _at_least(self, held_out=0, max_length=2, synthetic_rows=1)
        _at_least(self, max_prompt_tokens=1, max_answer_tokens=2, synthesis_batch=1)


def is_export(init: str) -> bool:
    """Does this `DrafterOptions.init` name the directory of an exported drafter?"""
    return init not in ("target", "random")


@dataclass(frozen=True)
class DrafterOptions:
    """Shape of the drafter; none: the export's that `init` names, else the target's own value."""

    init: Annotated[str, tyro.conf.arg(aliases=["--init-from"])] = "target"
    """"target" (its last layers), "random", or a drafter's directory, of z-lab or speculators."""
    num_layers: int | None = None
    """None, and no export: 2."""
    block_size: int | None = None
    """None, and no export: 8."""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    sliding_window: int | None = None
    """Of sliding layers, 2048 if layer_types has any; alone, all layers but the last slide."""
    layer_types: tuple[str, ...] | None = None
    """One a layer, full or sliding, or with a count: `--drafter.layer-types 4xsliding full`."""
    is_causal: bool | None = None
    """Override of in-block causality for every layer."""

    def __post_init__(self) -> None:
        _at_least(self, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1)
        _at_least(self, intermediate_size=1, sliding_window=1)
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", expand_layer_types(self.layer_types))
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise UserError(f"block_size {self.block_size} is not supported: use {BLOCK_SIZES}")


@dataclass(frozen=True)
class LossOptions:
    kind: LossKind = "ce"
    """Of labels: ce, or dpace with its own weights; of the target's distribution: kl, lk."""
    gamma: str = "auto"
    """Decay of the slot weights: a positive number, "auto" (by block size) or "none" (uniform)."""
    alpha: float = 0.5
    """Floor of D-PACE's per-slot acceptance; dpace only."""
    contiguous: bool = True
    """Stop supervising a block at its first unsupervised slot."""
    chunk_rows: int = 512
    """Rows whose logits exist at one time."""
    fp8_head: bool = False
    """Compute the frozen head's logits in FP8: faster on a GPU of compute capability 9.0, and they
    carry its rounding; ce and dpace only."""

    def __post_init__(self) -> None:
        resolve_gamma(self.gamma, 16)  # raises for 0, negative, NaN or text
        _at_least(self, chunk_rows=1)
        check_loss(self.kind, self.alpha)
        if self.fp8_head and needs_teacher(self.kind):
            raise UserError(
                f"loss '{self.kind}' compares the drafter's logits with the target's, both in full "
                "precision: leave --loss.fp8-head out"
            )
        idle = "gamma" if self.kind == "dpace" else "alpha"
        if (given := getattr(self, idle)) != (own := getattr(LossOptions, idle)):
            raise UserError(f"{idle} {given} is of no use to loss '{self.kind}': leave it at {own}")


@dataclass(frozen=True)
class OptimOptions:
    name: Literal["muon", "adamw"] = "muon"
    """Muon updates the matrices and AdamW the vectors, or AdamW both."""
    lr: float | None = None
    """Of the matrices; none: 0.02 for Muon, 6e-4 for AdamW."""
    vector_lr: float | None = None
    """Of norms and biases; none: 6e-4."""
    muon_adjust: Literal["original", "match_rms_adamw"] = "original"
    """How Muon scales its rate by a matrix's shape; match_rms_adamw wants an AdamW-sized lr."""
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Of matrices only, never of norms or biases."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """wsd: constant, then linear decay over the last `decay_fraction`."""
    warmup_fraction: float = 0.04
    decay_fraction: float = 0.2
    min_lr_ratio: float = 0.0
    """Last learning rate over the peak."""
    max_nonfinite: int = 5
    """Consecutive non-finite steps skipped before training stops."""

    def __post_init__(self) -> None:
        _at_least(self, lr=0, vector_lr=0, weight_decay=0, clip=0, max_nonfinite=1)
        for name in ("warmup_fraction", "decay_fraction", "min_lr_ratio", "momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} {getattr(self, name)} must be from 0 to 1")
        if self.warmup_fraction + self.decay_fraction > 1:
            raise UserError("warmup_fraction and decay_fraction must not exceed 1 together")


@dataclass(frozen=True)
class BatchOptions:
    token_budget: int = 2048
    """Context tokens of one captured feature batch, at most."""
    max_documents: int = 8
    """Conversations of one feature batch, at most."""
    anchors_per_sequence: int = 16
    """Anchors (blocks) drawn from each conversation, at most."""
    anchor_budget: int = 128
    """Blocks of one micro-batch, at most."""
    draws: int = 1
    """Anchor draws from each captured feature batch; each is a micro-batch of its own."""
    accumulate: int = 1
    """Micro-batches of one optimizer step, on each drafter."""
    anchor_chunk: int | None = None
    """Blocks of one backward pass; a micro-batch of more takes several. None: all at once."""

    def __post_init__(self) -> None:
        _at_least(self, token_budget=2, max_documents=1, anchors_per_sequence=1)
        _at_least(self, anchor_budget=1, draws=1, accumulate=1, anchor_chunk=1)

    @property
    def blocks_at_once(self) -> int:
        """Blocks whose activations exist at one time, at most: with tokens, what memory follows."""
        return min(self.anchor_budget, self.anchor_chunk or self.anchor_budget)


@dataclass(frozen=True)
class EvalOptions:
    prompts: tuple[str, ...] = ("humaneval", "gsm8k", "mtbench")
    """Prompt sets decoded before and after; a set's name or a file."""
    prompts_per_set: int = 8
    """0: no decoding at all."""
    max_new_tokens: int = 64
    held_out_prompts: bool = True
    """Also decode the prompts of the held-out conversations."""
    every: int = 50
    """Optimizer steps between validations; 0: only at the end."""
    max_validation_blocks: int = 256
    batch: int = 8
    """Prompts decoded side by side; no number depends on it."""
    decode_every: int = 0
    """Optimizer steps between decodings of the prompts, whose accepted length then says which
    weights are the best; 0: never, and held-out blocks say so. With ranks, target 0 decodes."""

    def __post_init__(self) -> None:
        _at_least(self, prompts_per_set=0, max_new_tokens=1, every=0, max_validation_blocks=1)
        _at_least(self, batch=1, decode_every=0)
        if self.decode_every and not (self.prompts and self.prompts_per_set):
            raise UserError(
                f"decode_every {self.decode_every} has nothing to decode: give prompts and "
                "prompts_per_set"
            )


@dataclass(frozen=True)
class RunOptions:
    dir: Path | None = None
    """Run folder, private to the user; none: runs/quickstart, -2, -3 and so on."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in `dir` (none: the newest in runs/) from its last checkpoint."""
    checkpoint_every: int = 100
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    tensorboard: bool = False
    export: bool = True
    """Export and evaluate after the last step; off: end there, as benchmarks and sweeps do."""

    def __post_init__(self) -> None:
        _at_least(self, checkpoint_every=1, keep_checkpoints=1)


@dataclass(frozen=True)
class TopologyOptions:
    """How many processes do what. Both numbers, or neither: then one process is both sides."""

    targets: int | Literal["auto"] | None = None
    """Ranks that hold a target; auto: times both sides and splits the ranks."""
    drafters: int | None = None
    """Ranks that hold a drafter, trained data parallel."""
    devices: int | None = None
    """Ranks to split with --targets auto; none: one for each GPU, or those torchrun started."""
    shard: bool = False
    """Shard the drafters' parameters, gradients and moments over them (fully_shard; AdamW)."""
    buffers: int = 3
    """Feature batches a drafter has room for: the one in use and those on their way."""
    stall_seconds: float = 600.0
    """A rank that does one thing for longer than this ends the run, and is named."""
    peak_tflops: float | None = None
    """Of one device, for MFU; none: a measured bf16 matrix product (no MFU on CPUs)."""

    def __post_init__(self) -> None:
        _at_least(self, drafters=1, devices=2, buffers=2, stall_seconds=1, peak_tflops=0)
        automatic = self.targets == "auto"
        if not automatic and (self.targets is None) != (self.drafters is None):
            raise UserError(
                f"--targets {self.targets} and --drafters {self.drafters}: give both, or neither "
                "for one process"
            )
        if isinstance(self.targets, int) and self.targets < 1:
            raise UserError(f"targets {self.targets} must be at least 1, or auto")
        if automatic and self.drafters is not None:
            raise UserError("--targets auto chooses the drafters too: leave --drafters out")
        if self.devices is not None and not automatic:
            raise UserError(f"--devices {self.devices} is for --targets auto only")


@dataclass(frozen=True)
class TrainConfig:
    """Train a DFlash drafter for a frozen target."""

    target: TargetOptions = field(default_factory=TargetOptions)
    data: DataOptions = field(default_factory=DataOptions)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    run: RunOptions = field(default_factory=RunOptions)
    topology: Annotated[TopologyOptions, tyro.conf.arg(name="")] = field(
        default_factory=TopologyOptions
    )
    steps: int = 240
    """Optimizer steps, unless `epochs` is given."""
    epochs: int | None = None
    """Passes over the training data, each sample once per pass; the steps follow from it."""
    seed: int = 0
    device: str = "auto"
    """auto: the first CUDA device if there is one, else the CPU."""

    def __post_init__(self) -> None:
        _at_least(self, steps=1, epochs=1, seed=0)
        if self.topology.shard and self.optim.name == "muon":
            raise UserError(
                "--shard is for AdamW: Muon orthogonalises whole matrices; add --optim.name adamw "
                "or leave --shard out"
            )
        data, batch = self.data, self.batch
        if self.target.devices > 1:
            self._check_split_target()
        if batch.anchors_per_sequence > batch.anchor_budget:
            raise UserError(
                f"anchors_per_sequence {batch.anchors_per_sequence} exceeds anchor_budget "
                f"{batch.anchor_budget}: a conversation must fit a batch; lower it or raise that"
            )
        if data.train is None and data.validation is not None:
            raise UserError(
                f"validation {data.validation} is of no use without train: give both files, or "
                "none for the target's own conversations"
            )
        if data.train is None and data.held_out >= data.synthetic_rows:
            raise UserError(
                f"held_out {data.held_out} of synthetic_rows {data.synthetic_rows} leaves nothing "
                "to train on: lower it or raise that"
            )
        # The template's own tokens come on top of a synthetic one; the plan checks the whole.
        names, longest = data.longest
        if longest > batch.token_budget:
            raise UserError(
                f"{names} {longest} exceeds token_budget {batch.token_budget}: a conversation must "
                "fit a batch; lower it or raise that"
            )

    def _check_split_target(self) -> None:
        said = f"target.devices {self.target.devices}: a target over several GPUs"
        if self.data.train is None:
            raise UserError(f"{said} cannot write its own data: give --data.train")
        if self.eval.prompts_per_set:
            raise UserError(
                f"{said} cannot decode: add --eval.prompts-per-set 0, and evaluate the export by "
                "`python -m dflash_ext.evaluate`"
            )
        if self.topology.targets == "auto":
            raise UserError(f"{said} cannot be timed by --targets auto: give both numbers")


def cpu_recipe() -> TrainConfig:
    """Ten minutes in all on two cores, so everything is small: see the README for what it reaches.

    AdamW, because Muon's iteration costs about as much here as the rest of a step (held-out
    accepted length with blocks of 8: 1.13 after 130 steps of AdamW, 1.05 after 80 of Muon). So few
    steps want the target's weights (1.18; random ones 1.12), and D-PACE (1.20) here as elsewhere.
    """
    return TrainConfig(
        drafter=DrafterOptions(num_layers=2, block_size=4),
        data=DataOptions(
            synthetic_rows=150, held_out=16, max_answer_tokens=128, synthesis_batch=224
        ),
        loss=LossOptions(kind="dpace"),
        optim=OptimOptions(name="adamw", lr=2e-3),
        # A capture costs more than a micro-batch here, so every one of them is used four times.
        batch=BatchOptions(draws=4),
        eval=EvalOptions(prompts_per_set=3, max_new_tokens=32, every=65),
        run=RunOptions(checkpoint_every=65),
        steps=130,
    )


def one_gpu_recipe() -> TrainConfig:
    """Some eight minutes on one large GPU: more data, a deeper drafter, larger batches.

    Initialisation and loss are the best of those that runs/ablations.sh tried (docs/benchmarks.md);
    twice the anchors do as well a step and take longer.
    """
    return TrainConfig(
        data=DataOptions(synthetic_rows=6000, held_out=128, synthesis_batch=2048),
        drafter=DrafterOptions(init="random", num_layers=5, block_size=8),
        loss=LossOptions(kind="dpace", chunk_rows=4096),
        batch=BatchOptions(
            token_budget=16384, max_documents=64, anchors_per_sequence=64, anchor_budget=2048
        ),
        # Decoding one prompt at a time is the slow part: the device waits for the host.
        eval=EvalOptions(prompts_per_set=6, every=100),
        run=RunOptions(checkpoint_every=500),
        steps=900,
    )


def eight_gpu_recipe() -> TrainConfig:
    """The headline run: five targets feed three drafters. Its data, target and name are yours.

    --data.train, --target.path and --run.dir have no default here.
    """
    return TrainConfig(
        target=TargetOptions(path=REQUIRED),
        data=DataOptions(train=REQUIRED, held_out=128, max_length=8192),
        drafter=DrafterOptions(init="random", num_layers=5, block_size=16),
        loss=LossOptions(gamma="10", chunk_rows=4096),
        optim=OptimOptions(name="adamw", lr=6e-4, vector_lr=6e-4),
        batch=BatchOptions(
            token_budget=49152,
            max_documents=64,
            anchors_per_sequence=512,
            anchor_budget=64 * 512,  # never the limit: a document gets all its anchors
            anchor_chunk=2048,
        ),
        eval=EvalOptions(prompts_per_set=6, every=500),
        run=RunOptions(dir=Path(REQUIRED), checkpoint_every=500),
        topology=TopologyOptions(targets=5, drafters=3),
        epochs=1,
    )


RECIPES = {"cpu": cpu_recipe, "one_gpu": one_gpu_recipe, "eight_gpu": eight_gpu_recipe}


def check_given(config: TrainConfig) -> None:
    """UserError if an option that a recipe leaves to its user is missing."""
    values = {
        "--target.path": config.target.path,
        "--data.train": config.data.train,
        "--run.dir": str(config.run.dir),
    }
    if missing := [name for name, value in values.items() if value == REQUIRED]:
        raise UserError(f"this recipe needs {', '.join(missing)}: give what is your own")


def to_json(config: TrainConfig) -> str:
    """The resolved configuration as readable JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        raise TypeError(type(value).__name__)

    return json.dumps(dataclasses.asdict(config), indent=2, default=plain) + "\n"
