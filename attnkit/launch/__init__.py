"""attnkit.launch: the command line, from Hydra's composition to a run folder.

main       command-line arguments, help, exit codes
api        the same from Python: attnkit.run, attnkit.sweep
command    commands and overrides as text
errors     how a command ends
config/    turns a command line into one plain, checked configuration (the only Hydra)
decide     turns that configuration into a job, which is plain data
several    carries out the runs of a job: folders, seeds, processes, results
run        one run: its data, module and trainer (trainer)
modes/     the table of modes, and a file for what each mode does
folder, console   run folders, printed output and run.log
records, reproduce   run=reproduce: experiments with published results
processes/ this process, ranks, torchrun and srun, locks
sweep/     many runs: trials, launchers, resuming, studies by Optuna, ranking and report
"""

import time

STARTED = time.perf_counter()
