"""Tables and pictures of an experiment from its recorded trials.

Each figure is a mean over seeds of one figure per trial. No round is selected, except for the best accuracy within
given uploads.
"""
