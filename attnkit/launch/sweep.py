"""`-m key=a,b`: every trial checked before the first starts, one folder each, one ranked table.

Hydra's own sweeper and launcher run the trials; `hydra/sweeper=` and `hydra/launcher=` choose
others.
"""

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from attnkit.launch import folder as folders
from attnkit.launch import ranking, tradeoff
from attnkit.launch.compose import CONFIG_NAME, Composer
from attnkit.launch.errors import CRASHED, Interrupted, summary
from attnkit.launch.jobs import Request, decide
from attnkit.launch.ranking import Trial
from attnkit.launch.run import execute
from attnkit.lightning.errors import UserError

_NAMING = re.compile(r"[\w.+-]{1,30}")  # values short and plain enough for a folder name


def sweep(composer: Composer, overrides: Sequence[str]) -> int:
    """Run one trial for each combination; returns the exit code, 1 if a trial failed."""
    swept = [o for o in composer.parse(overrides) if o.is_sweep_override()]
    for override in composer.parse(overrides):
        if override.key_or_group == "resume":
            raise UserError(f"{override.input_line}: not with -m; resume one of its runs at a time")
        if override in swept and override.key_or_group in ("run_dir", "allow"):
            raise UserError(f"{override.input_line}: one for all trials")
    place, hydra, rest = _sorted_out(overrides)
    combinations = _combinations(composer, rest)
    root = Request.read(composer, [*combinations[0], *place]).folder(sweep=True)
    for combination in combinations:
        try:
            job = decide(Request.read(composer, combination), root / "trial")
        except UserError as error:
            lines = str(error).splitlines()[:2]
            lines.append(f"  in the trial {' '.join(combination)}")
            raise UserError("\n".join(lines)) from error

    root = folders.create(root, fresh=not root.exists())
    print(f"{len(combinations)} trials in {root}", flush=True)
    texts = [
        *composer.writable(rest, combinations),
        *hydra,
        f"hydra.sweep.dir={_quoted(str(root))}",
        f"hydra.sweep.subdir={_quoted(_subdir(composer, swept))}",
        "hydra.mode=MULTIRUN",
    ]
    keys = tuple(o.key_or_group for o in swept)
    run_one = partial(trial, keys=keys, config_dir=composer.config_dir)
    try:
        batches = composer.hydra.multirun(CONFIG_NAME, run_one, texts)
    except Interrupted as error:
        message = f"{error}\nthe trials after it were not started"
        raise Interrupted(message, error.code) from None
    trials = [returned.return_value for batch in batches or [] for returned in batch]
    trials, figures = ranking.ranked(trials, job.config)
    said = ranking.in_words(trials, [o for o in rest if _key(o) not in keys])
    ranking.save(root / ranking.FILE, trials, figures)
    ranking.save_markdown(root / ranking.MARKDOWN, trials, figures, said)
    ranking.show(trials, figures)
    print(f"{said}\n  table  {root / ranking.FILE}")
    print(f"         {root / ranking.MARKDOWN}")
    metric = next((n for n in ("test/accuracy", *figures) if n in figures), "")
    if tradeoff.draw(root / tradeoff.FILE, trials, metric):
        print(f"  costs  {root / tradeoff.FILE}")
    return CRASHED if any(t.error for t in trials) else 0


def trial(_: DictConfig, *, keys: tuple[str, ...], config_dir: Path | None) -> Trial:
    """One trial, in whatever process the launcher chose. Its error is its result."""
    hydra = HydraConfig.get()
    overrides = [o.lstrip("+") if _key(o) in keys else o for o in hydra.overrides.task]
    given = {_key(o): o.partition("=")[2] for o in overrides}
    folder = Path(hydra.runtime.output_dir)
    values = {key: given[key] for key in keys if key in given}
    result = Trial(int(hydra.job.num), str(folder), values)
    print(
        f"\ntrial {result.number}  " + " ".join(f"{k}={v}" for k, v in values.items()), flush=True
    )
    try:
        # Composed again from its command line, which also tells where each key was written.
        job = decide(Request.read(Composer(config_dir), overrides), folder)
        result.results = execute(job).results
    except Interrupted:
        raise
    except Exception as error:
        result.error = summary(error)
        (folder / "error.txt").write_text(f"{result.error}\n", encoding="utf-8")
        print(f"attnkit: trial {result.number}: {result.error}", file=sys.stderr, flush=True)
    return result


def _sorted_out(overrides: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The sweep's own folder, Hydra's settings, and what the trials are made of."""
    place = [o for o in overrides if _key(o) == "run_dir"]
    hydra = [o for o in overrides if re.match(r"hydra[./]", _key(o))]
    return place, hydra, [o for o in overrides if o not in place and o not in hydra]


def _combinations(composer: Composer, overrides: Sequence[str]) -> list[list[str]]:
    try:
        return BasicSweeper.split_arguments(composer.parse(overrides), None)[0]
    except HydraException as error:
        raise UserError(f"-m: {error}") from error


def _subdir(composer: Composer, swept: Sequence[Override]) -> str:
    """Folder name of a trial: its number and, where they make a name, its values.

    Hydra fills it in for each trial; a group stands for its choice, a key for its value.
    """
    groups = composer.groups()
    parts = []
    for override in swept:
        key = override.key_or_group
        if all(_NAMING.fullmatch(str(value)) for value in override.sweep_string_iterator()):
            source = f"hydra.runtime.choices.{key}" if key in groups else key
            parts.append(f"{key}=${{{source}}}")
    return "_".join(["${hydra.job.num}", ",".join(parts)]).rstrip("_")


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
