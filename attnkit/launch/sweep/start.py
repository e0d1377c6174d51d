"""`-m key=a,b`: every trial checked before the first starts, one folder each, one ranked table.

The trials are on record in sweep.json before the first of them starts, so that whatever ends a
sweep, it can go on (launch/sweep/resume.py).
"""

from collections.abc import Sequence
from itertools import product

from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import SUBDIR, trial_folder
from attnkit.launch.job import folder as folders
from attnkit.launch.job.request import Request
from attnkit.launch.sweep.launchers import Launch
from attnkit.launch.sweep.record import held, new_trial
from attnkit.launch.sweep.resume import resume
from attnkit.launch.sweep.run_trials import begin, check_trial, order_of, run_trials
from attnkit.launch.sweep.study import loop as study
from attnkit.lightning.errors import UserError


def sweep(composer: Composer, overrides: Sequence[str], words: Sequence[str]) -> int:
    """Run one trial for each combination; returns the exit code, 1 if a trial failed.

    Args:
        words: Hydra's, as config/hydra_words.py has read them.
    """
    parsed = composer.parse(overrides)
    if any(o.key_or_group == "resume" for o in parsed):
        return resume(composer, overrides, words)
    for override in parsed:
        if override.is_sweep_override() and override.key_or_group in ("run_dir", "allow"):
            raise UserError(f"{override.input_line}: must be the same for all trials")
    place = [o for o in overrides if key_of(o) == "run_dir"]
    rest = [o for o in overrides if o not in place]
    if study.is_chosen(words):
        return study.start(composer, rest, place, words)
    launch = Launch.read(composer, words)
    combinations = _combinations(composer, rest)
    request = Request.read(composer, [*combinations[0], *place])
    root = request.folder(sweep=True)
    names: list[str | None] = []
    for number, combination in enumerate(combinations):
        check_trial(composer, combination, root)
        name = trial_folder(composer, words, combination, number)
        if name is not None and name in names:
            raise UserError(
                f"{SUBDIR}: trials {names.index(name)} and {number} would share the folder {name}\n"
                "  with ${hydra.job.num} in it, each has its own"
            )
        names.append(name)

    root = folders.create(root, fresh=request.config.get("run_dir") is None)
    keys = tuple(o.key_or_group for o in parsed if o.is_sweep_override())
    made = [[o for o in c if key_of(o) != "allow"] for c in combinations]
    trials = (new_trial(root, keys, n, made[n], name) for n, name in enumerate(names))
    with held(root):
        planned = begin(composer, root, overrides, words, keys, trials=tuple(trials))
        print(f"{len(combinations)} trials in {root}", flush=True)
        order = order_of(composer, planned, planned.allow)
        return run_trials(launch, planned, order, [range(len(combinations))])


def _combinations(composer: Composer, overrides: Sequence[str]) -> list[list[str]]:
    """Each combination of the values, the last key changing first."""
    choices = []
    for override in composer.parse(overrides):
        if override.is_interval_sweep():
            raise UserError(
                f"{override.input_line}: this is a range, not a list of values\n"
                "  key=a,b or key=range(1,9); or let Optuna choose: hydra/sweeper=optuna"
            )
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    if not all(choices):
        raise UserError("-m: there are no trials: glob(…) matches no choice of its group")
    return [list(combination) for combination in product(*choices)]
