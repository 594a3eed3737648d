"""The training loop: the file to read first.

    open the data -> hold the run folder -> find the newest good checkpoint -> build the model and its engine
    then, step by step: next global batch, counts, forward and backward, update, report; save and validate when due
    (a checkpoint is written while the next steps are done; at the end, and before stopping, it is waited for)

Every rank runs this same code. Decisions that all must take alike (stop, skip, save) follow from numbers that all of
them have, so no rank waits for another that went a different way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from refusion_train.config import Config
from refusion_train.errors import TrainingError
from refusion_train.parallel.groups import destroy, init_groups
from refusion_train.parallel.lost import rank_lost
from refusion_train.telemetry import leave_error, show_warnings
from refusion_train.train import setup
from refusion_train.train.run import Run
from refusion_train.train.signals import STOPPED, StopSignals
from refusion_train.train.step import next_batch, train_step
from refusion_train.train.watchdog import Watchdog


def train(config: Config) -> int:
    """Train, or go on with, the run in `config.run_dir`; one rank of the group that the environment describes.

    Returns the exit code: 0 when `train.steps` are done (now or before), 75 when a signal asked to stop, after saving.
    Raises RefusionError for everything that is the user's to mend. Fills in `config.model.vocab_size`.
    """
    with _explained(), StopSignals() as stop:
        show_warnings()
        groups = init_groups(config)
        data = setup.open_data(config)
        with setup.own_folder(config):
            checkpoint, state = setup.find_checkpoint(config, data)
            setup.check_supply(config, data, state)
            if checkpoint is not None and setup.is_finished(config, data, state):
                if groups.rank == 0:
                    print(f"{config.run_dir} is finished: {state.step} steps; for more, raise train.steps", flush=True)
                code = 0
            else:
                with (
                    Watchdog(config.train.timeout_minutes) as watchdog,
                    setup.assemble(config, groups, data, checkpoint, state, stop) as run,
                ):
                    code = run_steps(run, watchdog)
        destroy()
        return code


def run_steps(run: Run, watchdog: Watchdog) -> int:
    """Steps, until all are done or a signal comes."""
    steps, interval = run.config.train.steps, run.config.checkpoint.interval
    run.validate_if_due(begun=False)
    watchdog.beat(run.state.step)
    while run.state.step < steps:
        began = time.perf_counter()
        batch, counts = next_batch(run)
        if counts.saved:
            run.end_saving()
        if counts.stop:
            run.save()
            run.end_saving()
            run.telemetry.say(f"stopped after step {run.state.step}; run again to go on")
            return STOPPED
        run.telemetry.step(train_step(run, batch, counts, began))
        watchdog.beat(run.state.step)
        if run.state.step % interval == 0 or run.state.step == steps:
            run.save()
        run.validate_if_due()
        watchdog.beat(run.state.step)
    run.end_saving()
    return 0


@contextmanager
def _explained() -> Iterator[None]:
    """Leave an error for the launcher; say in one line that another rank has gone, as its own error tells why."""
    try:
        yield
    except Exception as error:
        lost = rank_lost(error)
        leave_error(error, consequence=lost)
        if lost:
            first_line = str(error).strip().splitlines()[0]
            raise TrainingError(f"another process of the group has gone ({first_line}); see its own error") from error
        raise
