"""attnkit.launch: the command line, from Hydra's composition to a run folder.

main       arguments, help, exit codes
api        the same from Python: attnkit.run, attnkit.sweep
command    commands and overrides as texts
errors, signals   how a command ends
config/    from a command line to one plain, checked configuration (the only Hydra)
decide     what a command line asks for, as plain data: a job
several    the runs of a job, one after the other: folders, seeds, processes, results
run        one run: its data, module and trainer (parts, trainer)
modes/     what a run does: the table of modes, a file for each
folder, provenance, console   where a run writes, where it comes from, what it says
measure/   run=check and run=bench
records/   run=reproduce: experiments with published results
processes/ ranks, torchrun and srun, GPUs, locks, OpenMP
sweep/     many runs: trials, launchers, resuming, studies by Optuna, ranking and report
"""

import time

STARTED = time.perf_counter()
