# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports as one page with plots, of run directories and of grids. The extra `analysis` has the libraries they need.

- report.py is the entry, page.py and page.html.j2 the page, and sections.py its sections: to add one, write the
  function there and list it.
- data.py is what the sections show: runs.py reads and compares run directories, grids.py reads ledgers and folders of
  runs, effects.py compares speed and memory, verdicts.py quality.
- figures.py draws all plots; samples.py shows sample grids; labels.py writes numbers and names.
- sampling_table.py is apart: evaluations at several sampling options as a table with a plot.
"""
