"""Analyses of a method's mechanism: ``python -m benchmarks analyse EXPERIMENT``.

A trial is run as by ``run``. Each device's state folder is read after its evaluation (``looking``, ``observing``), and
these additional rows are written:

    data     label counts of each device's training data, and their distances
    masks    similarity of the masks of two devices, and of a device's mask to its own at the evaluation before
    kept     share of each layer that a device's mask keeps, as a histogram over devices
    global   the one mask of a sparse global model: overlap with the previous mask and with the first one
    private  share of a DM-PFL device's weights that the global mask has, too
    models   distances between personal models
    gates    histogram of pFedGate's gate weights, and distances between gating layers
    theorem  the quantities in FedSPU's Theorem 1 that can be measured (``theorem``)

A row is small: means, extremes, histograms of 20 bins, and matrices of at most 20 devices. ``report`` draws the
pictures from the rows.
"""
