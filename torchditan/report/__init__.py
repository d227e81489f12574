# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports as one page with plots. report.py is the entry, page.py and page.html.j2 the one page of all reports.

A section is a function that returns a `Section`, which is shown if it has blocks. Those of runs are listed in
run_page.py, those of grids in grid_page.py: to add one, write the function there and list it.

- Runs: runs.py reads and compares run directories, samples.py shows their pictures.
- Grids: grid_results.py reads ledgers (run_folder.py: folders of runs without one); effects.py compares speed and
  memory, verdicts.py quality; losses.py has the curves, checks.py the warnings.
- plots.py draws all figures; labels.py writes numbers and names.
- sampling_table.py is apart: evaluations at several sampling options as a table with a plot.

May import: ablation, config, evaluation, finetune, run.
"""
