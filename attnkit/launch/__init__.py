"""attnkit.launch: the command line, from Hydra's composition to a run folder.

main     arguments, help, exit codes            (Hydra)
compose  command line → one configuration       (Hydra)
sources  where a key was written
schema, signatures, validate   the constructors are the schema
jobs     what is to be done, decided and checked; nothing on disk yet
folder   run folders
run      does it
ranks    starts the ranks of a run, passes signals on, says which one failed and how
rank     is one of them: `python -m attnkit.launch.processes.one_rank RUN_DIR`, without Hydra
launcher ranks that torchrun or srun has started
work     one training, test or prediction       (torch)
report   tables on screen and in files
"""
