"""Secure aggregation: the sum of updates comes out, never one of them.

SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead",
CCS 2020), after Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with
one change for masks: devices with the same mask form a *cell*, and each pair of a cell shares a pad. The modules:

    numbers    updates as whole numbers modulo 2^b
    pads       keys, signatures, pads, and shares for one reader
    shamir     a secret as shares, of which some suffice
    consistency   one digest of a round's model, graphs, settings and plan
    groups     cells, neighbours, and how many shares suffice
"""
