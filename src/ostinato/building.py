"""Puts the parts together: model, tokenizer, template, books, arena, engine."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from .assembly import Assembler
from .config import Settings
from .errors import ParameterError
from .kv.hashing import Namespace
from .models.digest import digest_bytes, digest_file
from .ports import Clock
from .prompt.canonical import CanonicalRules, read_canonical_rules
from .prompt.registry import PromptRegistry, read_prompts
from .prompt.rules import MessageRules, read_rules
from .runtime import Runtime
from .tenants import allowances
from .types import Retention, Reuse, ReuseMode
from .verifying import Watch

if TYPE_CHECKING:
    from .engines.base import RunnerInfo
    from .engines.batching import Batcher
    from .engines.runners import LoadedModel, PagedRunner, StatefulRunner
    from .engines.worker import Worker
    from .events import Event, Observer
    from .kv.manager import KVManager
    from .kv.sessions import Sessions
    from .kv.terms import Allowances
    from .kv.tiers.shared import SharedTier
    from .kv.transfer import TierLink
    from .models.store import LocalModel
    from .prompt.template import Template
    from .prompt.tokens import HFTokenizer
    from .request_log import RequestLog

_log = logging.getLogger(__name__)

_WRITE_BACK_BYTES = 64 << 20
"""What blocks on their way to the shared tier may take; more are not stored."""
_FOUND_IN_TOKENS = 1 << 20
"""Of stored text, that runs are found in at least; six bytes each."""
_SPARE_BYTES = 512 << 20
"""Of memory, for all that is neither weights nor KV."""


def build_runtime(
    settings: Settings,
    clock: Clock,
    progress: Any = None,
    *,
    rules: MessageRules | None = None,
    canonical_rules: CanonicalRules | None = None,
    own_template: Template | None = None,
) -> Runtime:
    """Put the parts together: model, tokenizer, template, books, arena, engine."""
    from .engines.worker import Worker
    from .models.fetch import fetch
    from .models.store import ModelStore
    from .prompt.template import template_for
    from .prompt.tokens import HFTokenizer

    assert settings.store is not None, "Settings.from_environment sets the store"
    # What can be wrong in the operator's files is told before a model is fetched.
    if rules is None and settings.message_rules is not None:
        rules = read_rules(settings.message_rules)
    if canonical_rules is None and settings.canonical is not None:
        canonical_rules = read_canonical_rules(settings.canonical)
    prompts = PromptRegistry(() if settings.prompts is None else read_prompts(settings.prompts))
    local = fetch(
        settings.model,
        ModelStore(settings.store),
        progress=progress,
        offline=settings.offline,
        token=settings.hf_token,
    )
    nonce = str(secrets.randbelow(9 * 10**19) + 10**19)
    tokenizer = HFTokenizer.from_folder(local.path, nonce=nonce)
    template = own_template or template_for(tokenizer, settings.template, clock=clock, nonce=nonce)
    log = _request_log(settings, clock, tokenizer.special_tokens.values())
    worker = Worker("ostinato-engine")

    def assembler(namespace: Namespace) -> Assembler:
        return Assembler(
            tokenizer,
            template,
            namespace,
            rules=rules,
            canonical_rules=canonical_rules,
            trim=settings.trim_rules,
            prompts=prompts,
            keep_answers=settings.keep_answers,
            refuse_special_text=settings.refuse_special_text,
        )

    try:
        runtime = worker.submit(lambda: _start(settings, local, tokenizer, assembler, clock, worker)).result()
    except BaseException:
        worker.close()
        if log is not None:
            log.close()
        raise
    if log is not None:
        runtime.observers.append(log)
        runtime.on_close.append(log.close)
    if settings.otel:
        from .spans import SpanObserver, exported_tracer

        tracer, close = exported_tracer()
        runtime.observers.append(SpanObserver(tracer, model=runtime.model_name, clock=clock))
        runtime.on_close.append(close)
    return runtime


def _request_log(settings: Settings, clock: Clock, marker_ids: Iterable[int]) -> RequestLog | None:
    """The log that was asked for."""
    if settings.trace is None:
        return None
    from .records import log_key
    from .request_log import RequestLog

    return RequestLog(
        settings.trace,
        key=log_key(settings.trace_key) if settings.trace_key else secrets.token_bytes(32),
        block_tokens=settings.block_size,
        clock=clock,
        marker_ids=marker_ids,
        with_content=settings.trace_content,
        max_bytes=settings.trace_bytes,
    )


def _start(
    settings: Settings,
    local: LocalModel,
    tokenizer: HFTokenizer,
    assembler: Callable[[Namespace], Assembler],
    clock: Clock,
    worker: Worker,
) -> Runtime:
    """Load the model and start the engine; runs in ``worker``, which goes on as the engine."""
    import torch

    from .engines.hf import load_model
    from .engines.runners import PagedRunner
    from .kv.keeper import Keeper
    from .kv.sessions import Sessions

    _check_device(settings.device, torch)
    loaded = load_model(
        local.path,
        dtype=_dtype(settings, torch),
        device=settings.device,
        max_model_len=settings.max_model_len,
        quantization=settings.quantization,
    )
    info, num_blocks = loaded.info, _num_blocks(settings, loaded.info)
    runtime: Runtime

    def observe(event: Event) -> None:  # nothing happens before the runtime is there
        runtime.observe(event)

    manager = _manager(settings, info, num_blocks, clock, observe)
    runner = _runner(loaded, num_blocks * settings.block_size)
    tier, link = None, None
    if isinstance(runner, PagedRunner):
        tier, link = _tier_link(settings, runner, clock, observe)
    sessions = Sessions(manager, clock)
    eos_token_ids = loaded.eos_token_ids | tokenizer.eos_token_ids
    batcher = _batcher(settings, runner, manager, sessions, link, clock, observe, worker)
    try:
        runtime = Runtime(
            model_name=local.name,
            tokenizer=tokenizer,
            assembler=assembler(_namespace(settings, local, tokenizer, info)),
            batcher=batcher,
            manager=manager,
            info=info,
            eos_token_ids=eos_token_ids,
            clock=clock,
            tier_link=link,
            sessions=sessions,
            deadline_s=math.inf if settings.deadline is None else settings.deadline,
            keeper=Keeper(manager, tier, settings.block_size * info.kv_bytes_per_token),
            revision=_revision(settings, local, info, eos_token_ids),
            budgets=_budgets(settings),
            reuse=_reuse(settings),
            watch=Watch(settings.reuse_sample, settings.reuse_max_kl),
        )
    except BaseException:
        batcher.close()  # or its loop would wait for requests in the thread that is to end
        raise
    return runtime


def _namespace(settings: Settings, local: LocalModel, tokenizer: HFTokenizer, info: RunnerInfo) -> Namespace:
    weights = local.weights_digest
    if settings.quantization is not None:  # other weights, and so other KV
        weights = digest_bytes(f"{weights} {settings.quantization}".encode())
    return Namespace(
        weights=weights,
        tokenizer=tokenizer.identity,
        template="",  # the assembler's to say
        kv_layout=info.kv_layout,
        kv_dtype=info.kv_dtype,
        rotary=info.rotary,
    )


def _manager(
    settings: Settings, info: RunnerInfo, num_blocks: int, clock: Clock, observer: Observer
) -> KVManager:
    from .kv.manager import KVManager
    from .kv.policies import make_policy

    policy = make_policy(
        settings.policy, num_blocks=num_blocks, block_tokens=settings.block_size, clock=clock
    )
    return KVManager(
        num_blocks,
        settings.block_size,
        policy=policy,
        observer=observer,
        clock=clock,
        allowances=_allowances(settings, settings.block_size * info.kv_bytes_per_token, in_tier=False),
        pinned_share=settings.pinned_share,
    )


def _runner(loaded: LoadedModel, num_slots: int) -> PagedRunner | StatefulRunner:
    from .engines.runners import PagedRunner, StatefulRunner

    if loaded.reuse_reason is not None:
        return StatefulRunner(loaded)
    try:
        return PagedRunner(loaded, num_slots)
    except RuntimeError as error:  # torch has no kind of its own for "out of memory" on a CPU
        size_gib = num_slots * loaded.kv_bytes_per_token / 2**30
        raise ParameterError(
            f"there is no memory for {size_gib:.1f} GiB of KV: lower kv_cache", param="kv_cache"
        ) from error


def _batcher(
    settings: Settings,
    runner: PagedRunner | StatefulRunner,
    manager: KVManager,
    sessions: Sessions,
    link: TierLink | None,
    clock: Clock,
    observer: Observer,
    worker: Worker,
) -> Batcher:
    from .engines.batching import Batcher, BatchingSettings
    from .engines.blending import Blender
    from .engines.runners import PagedRunner
    from .kv.archive import Archives
    from .kv.tending import Tender

    archives, blender = None, None
    if isinstance(runner, PagedRunner):
        num_found_in = max(_FOUND_IN_TOKENS, 4 * manager.num_blocks * manager.block_size)
        blender = Blender(manager, runner, link, num_found_in, seed=secrets.randbits(64))
        manager.on_purge.append(lambda selection: blender.clear())
    if settings.kv_recall is not None and isinstance(runner, PagedRunner):
        archives = Archives(runner.arena, settings.kv_recall)
        manager.on_purge.append(lambda selection: archives.clear())
    return Batcher(
        runner,
        manager,
        clock,
        BatchingSettings(
            settings.max_batch_tokens,
            settings.max_sequences,
            settings.max_waiting,
            itl_target_s=None if settings.itl_target_ms is None else settings.itl_target_ms / 1e3,
            recall_every=settings.kv_recall_every,
        ),
        observer=observer,
        worker=worker,
        tier_link=link,
        sessions=sessions,
        tender=Tender(manager, sessions),
        archives=archives,
        blender=blender,
    )


def _revision(settings: Settings, local: LocalModel, info: RunnerInfo, eos_token_ids: frozenset[int]) -> str:
    """A digest of what decides answers beside the namespace: with another one they may be others."""
    parts = [
        *(f"{name} {version(name)}" for name in ("ostinato", "torch", "transformers")),
        f"{settings.device} {settings.dtype} {settings.quantization} {settings.tier_codec}",
        f"{info.max_model_len} {info.vocab_size} {sorted(eos_token_ids)}",
        *(digest_file(path) for path in sorted(local.path.glob("*config.json"))),
    ]
    return digest_bytes("\n".join(parts).encode())


def _budgets(settings: Settings) -> dict[str, Retention]:
    """The KV budgets of requests that bring none, by tenant; ``""``: everyone else's."""
    budgets = {tenant.id: tenant.kv_budget for tenant in settings.all_tenants()}
    budgets[""] = settings.kv_budget
    return {
        tenant: Retention(budget, settings.retention)
        for tenant, budget in budgets.items()
        if budget is not None
    }


def _reuse(settings: Settings) -> dict[str, Reuse]:
    """What KV requests may be answered with that do not say; likewise."""
    modes = {tenant.id: tenant.reuse for tenant in settings.all_tenants()}
    modes[""] = None if settings.reuse == "exact" else cast(ReuseMode, settings.reuse)
    return {
        tenant: Reuse(mode, settings.reuse_repair, settings.reuse_max_deviation)
        for tenant, mode in modes.items()
        if mode is not None
    }


def _num_blocks(settings: Settings, info: RunnerInfo) -> int:
    """How many blocks the KV capacity makes, and memory holds beside what is loaded already."""
    import psutil

    block_bytes = info.kv_bytes_per_token * settings.block_size
    capacity = settings.kv_cache
    if settings.device == "cpu":
        memory = psutil.virtual_memory()
        if capacity > memory.total:
            raise ParameterError(
                f"kv_cache is {capacity / 2**30:.1f} GiB, but this machine has {memory.total / 2**30:.1f}: "
                "lower it",
                param="kv_cache",
            )
        most = max(memory.available - _SPARE_BYTES, 0)
        if capacity > most:
            text = "kv_cache is %.1f GiB, but %.1f GiB of memory are left: taking those"
            _log.warning(text, capacity / 2**30, most / 2**30)
            capacity = most
    # A model without reuse keeps its state itself: blocks then only count tokens.
    num_blocks = capacity // block_bytes if block_bytes else info.max_model_len
    num_blocks = min(num_blocks, (2**31 - 1) // settings.block_size)  # slots are numbered in 32 bits
    if num_blocks < 2:
        raise ParameterError(
            f"there are {capacity} bytes for KV, but two blocks of this model need {2 * block_bytes}: "
            "raise kv_cache, or free memory",
            param="kv_cache",
        )
    return num_blocks


def _allowances(settings: Settings, block_bytes: int, *, in_tier: bool) -> Allowances:
    """What each tenant may keep, in the arena or in the shared tier."""
    return allowances(
        settings.all_tenants(),
        block_bytes=max(1, block_bytes),
        in_tier=in_tier,
        default_bytes=settings.tenant_shared_tier if in_tier else settings.tenant_kv_cache,
        ttl_s=math.inf if settings.cache_ttl is None else settings.cache_ttl,
    )


def _tier_link(
    settings: Settings, runner: PagedRunner, clock: Clock, observer: Observer
) -> tuple[SharedTier, TierLink] | tuple[None, None]:
    """The shared tier that was asked for. Models of different size share a folder, not a slab."""
    if settings.shared_tier is None:
        return None, None
    import psutil

    from .kv.approximate import ApproximateSlots
    from .kv.codecs.layered import make_codec
    from .kv.hashing import KEY_VERSION
    from .kv.tiers.shared import SharedTier
    from .kv.transfer import TierLink

    codec = make_codec(runner.arena, settings.block_size, settings.tier_codec)
    size = codec.payload_bytes
    if settings.shared_tier_bytes < size:
        raise ParameterError(
            f"shared_tier_bytes is {settings.shared_tier_bytes}, but one block of this model takes {size}: "
            "raise it",
            param="shared_tier_bytes",
        )
    folder = settings.shared_tier / f"blocks-of-{size}-bytes"
    tier = SharedTier.open(
        folder,
        slot_bytes=size,
        capacity_bytes=settings.shared_tier_bytes,
        version=KEY_VERSION,
        clock=clock,
        allowances=_allowances(settings, size, in_tier=True),
    )
    buffered_bytes = max(_WRITE_BACK_BYTES, 2 * size)
    ahead = runner.arena.populate(psutil.virtual_memory().available // 4)
    link = TierLink(
        tier,
        codec,
        settings.block_size,
        clock,
        max_buffered_bytes=buffered_bytes,
        idle=ahead,
        observer=observer,
        approximate=None if codec.is_exact else ApproximateSlots(runner.arena.num_slots),
    )
    return tier, link


def _check_device(name: str, torch: Any) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch says "not compiled with" by assertion
        reason = str(error).splitlines()[0][:200]
        raise ParameterError(f"cannot compute on device {name!r}: {reason}", param="device") from error


def _dtype(settings: Settings, torch: Any) -> Any:
    if settings.dtype == "auto":
        return torch.float32 if settings.device == "cpu" else "auto"
    if settings.dtype not in ("float32", "bfloat16", "float16"):
        raise ParameterError("dtype must be auto, float32, bfloat16 or float16", param="dtype")
    return getattr(torch, settings.dtype)
