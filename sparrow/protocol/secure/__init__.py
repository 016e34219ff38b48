"""Secure aggregation: the coordinator sees the sum of updates, but no single update.

SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova, CCS 2020), after Bonawitz et al., CCS 2017, with one change for
masks: devices with the same mask form a *cell*, and each pair of a cell shares a pad. The modules:

    numbers       updates as integers modulo 2^b
    pads          keys, signatures, pads, and sealed shares
    shamir        secret sharing
    consistency   one digest of a round's model, graphs, settings and plan
    groups        cells, neighbours and thresholds
"""
