"""Everything that must exist before the first step, made in the order in which it can fail cheaply.

Data and run folder come first: a wrong path, or a run that cannot be continued, is refused before a model is built.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from data_tools.output import write_whole
from refusion_train.checkpoint import layout, store
from refusion_train.checkpoint.writer import Writer
from refusion_train.config import Config, to_yaml
from refusion_train.data.loader import TrainLoader
from refusion_train.data.mixture import open_sources
from refusion_train.data.shard_index import Index
from refusion_train.data.shards import ShardSet, check_tokenizer
from refusion_train.errors import ConfigError
from refusion_train.model.slot_model import build_model_chunks
from refusion_train.objective import Objective, make_objective
from refusion_train.parallel.engine import Engine
from refusion_train.parallel.groups import Groups
from refusion_train.sources import sources_of
from refusion_train.telemetry import Telemetry, has_validation
from refusion_train.train import initial
from refusion_train.train.folder import CONFIG, hold, refuse_another_run
from refusion_train.train.optim import param_groups
from refusion_train.train.run import Data, Run
from refusion_train.train.signals import StopSignals
from refusion_train.train.state import TrainState, check_unchanged
from refusion_train.train.stragglers import RankTimes

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------------------ data


def open_data(config: Config) -> Data:
    """Open the datasets and settle what depends on them: `model.vocab_size`, if it is not given. Collective.

    Raises DataError or ConfigError, on all ranks alike.
    """
    data = store.on_every_rank(lambda: _open_data(config))
    index = data.index
    if config.model.init_from is not None:
        store.on_every_rank(lambda: initial.settle_model(config, index))
    if config.model.vocab_size is None:
        config.model.vocab_size = index.vocab_size
    if config.model.vocab_size < index.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the {index.vocab_size} token ids of "
            f"{_shown(config)}; leave it out, or raise it"
        )
    return data


def _open_data(config: Config) -> Data:
    sources = open_sources(config)
    for source in sources:
        tokenizer = source.dataset.tokenizer()
        if tokenizer is not None:
            check_tokenizer(source.dataset, tokenizer)
    index = sources[0].dataset.index
    if "mask" not in index.special_ids:
        raise ConfigError(f"{_shown(config)} has no mask token; build it with `refusion data shards`")
    if config.data.validation is None:
        return Data(sources, None)
    validation = ShardSet.of_run(config.data.validation, config.data)
    if validation.index.tokenizer != index.tokenizer:
        raise ConfigError(
            f"data.validation={config.data.validation} was made with another tokenizer than {_shown(config)}; build "
            "both with the same"
        )
    return Data(sources, validation)


def _shown(config: Config) -> str:
    """`data.train` for messages that concern all sources alike."""
    return f"data.train={', '.join(source.path for source in sources_of(config))}"


def check_supply(config: Config, data: Data, state: TrainState) -> None:
    """Refuse more steps than there is data for, where every source has a limit.

    Raises ConfigError on all ranks alike.
    """
    left = 0
    for source in data.sources:
        if source.config.epochs is None:
            return
        tokens = source.config.epochs * source.dataset.index.tokens
        left += max(0, tokens - state.source_tokens.get(source.dataset.fingerprint, 0))
    per_step = config.train.global_batch_size * config.data.sequence_length
    wanted = max(0, config.train.steps - state.step) * per_step
    if wanted > left:
        raise ConfigError(
            f"train.steps={config.train.steps} needs {wanted:,} more tokens, and data.train holds {left:,} more within "
            f"its limits; raise epochs of a source, or set train.steps={state.step + left // per_step}"
        )


def make_run_objective(config: Config, index: Index) -> Objective:
    """The objective of the run, with the special ids of its data."""
    special = index.special_ids
    return make_objective(config.objective, special["mask"], special["pad"])


# ------------------------------------------------------------------------------------------------------ run folder


@contextmanager
def own_folder(config: Config) -> Iterator[None]:
    """Make the run folder and hold it: no second training can write into it meanwhile. Collective.

    Raises ConfigError if it is held already, or if it holds a run that `checkpoint.resume: none` must not touch.
    """
    with ExitStack() as stack:
        store.on_first_rank(lambda: _take_folder(config, stack))
        yield


def _take_folder(config: Config, stack: ExitStack) -> None:
    folder = Path(config.run_dir)
    refuse_another_run(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    hold(folder, stack)


def find_checkpoint(config: Config, data: Data) -> tuple[Path | None, TrainState]:
    """The newest good checkpoint, which must be of this very run, and its progress; else a fresh start. Collective.

    Raises CheckpointError if no checkpoint is good, ConfigError for a change that would make it another run.
    """
    folder = store.on_first_rank(lambda: store.latest_good(store.checkpoints_of(config.run_dir)))
    if folder is None:
        return None, TrainState()
    saved = store.on_first_rank(lambda: store.read_state(folder))
    changes = check_unchanged(saved, config, data.sources, folder)
    if changes and dist.get_rank() == 0:
        logger.warning("going on from %s with changes: %s", folder.name, ", ".join(changes))
    return folder, TrainState.from_dict(saved)


def is_finished(config: Config, data: Data, state: TrainState) -> bool:
    """Whether there is nothing left to do, the last validation included. Collective."""
    if state.step < config.train.steps:
        return False
    if data.validation is None or state.step > config.train.steps:
        return True
    return store.on_first_rank(lambda: has_validation(config.run_dir, state.step))


# ----------------------------------------------------------------------------------------------------------- parts


@contextmanager
def assemble(
    config: Config, groups: Groups, data: Data, checkpoint: Path | None, state: TrainState, stop: StopSignals
) -> Iterator[Run]:
    """Build model, engine, loader and reports, restored from `checkpoint`, and close them at the end. Collective."""
    objective = make_run_objective(config, data.index)
    chunks = build_model_chunks(config, groups, objective.bidirectional)
    engine = Engine(config, groups, chunks, param_groups(chunks, config.train.weight_decay))
    if checkpoint is not None:
        layout.restore(engine, lambda tensors: store.load(checkpoint, tensors))
    elif config.model.init_from is not None:
        initial.load_weights(engine, config, data.index)
    host_group = None if groups.device.type == "cpu" else _new_host_group()
    writer = Writer(store.checkpoints_of(config.run_dir), config.checkpoint.keep, _new_host_group())
    store.on_first_rank(lambda: _write_config(config))
    loader = TrainLoader(data.sources, config, objective, groups.dp_rank, groups.dp_size, state.cursor)
    with loader, Telemetry(config, first_step=state.step, active=groups.rank == 0) as telemetry:
        if checkpoint is not None:
            telemetry.say(f"going on from {checkpoint}")
        elif config.model.init_from is not None:
            telemetry.say(f"starting with the weights of {config.model.init_from}")
        if groups.rank == 0 and config.train.warmup_steps >= config.train.steps:
            logger.warning(
                "train.warmup_steps=%d is not less than train.steps=%d: the rate never leaves its warm-up",
                config.train.warmup_steps, config.train.steps,
            )  # fmt: skip
        times = RankTimes(groups, host_group, config.train.log_interval)
        run = Run(config, groups, host_group, data, engine, loader, telemetry, writer, state, stop, state.step, times)
        try:
            yield run
        except BaseException as error:
            run.give_up_saving(error)
            raise


def _new_host_group() -> dist.ProcessGroup:
    """A group for what is exchanged on the host, without waiting for the device or for what others exchange."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank belongs to the group of all ranks"
    return group


def _write_config(config: Config) -> None:
    text = to_yaml(config)
    write_whole(Path(config.run_dir) / CONFIG, lambda partial: partial.write_text(text, encoding="utf-8"))
