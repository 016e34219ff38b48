"""Tables and pictures of an experiment from its recorded trials.

Every figure is the mean over seeds of one figure per trial. Nothing is chosen among rounds, except the best accuracy so
far at given uploads.
"""
