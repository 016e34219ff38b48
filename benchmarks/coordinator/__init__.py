"""The contest of coordinators, with clients that do not train: ours, Flower's and NVIDIA FLARE's.

``python -m benchmarks.coordinator``.

    contest     the compared models and cohorts, and the measurement
    sparrow     this project's coordinator; ``client`` is its device
    flower      Flower's deployment engine: SuperLink, SuperNodes, ``flwr run`` of ``flower_app``
    grpc        Flower's old gRPC API: ``grpc_server`` and ``grpc_client``
    flare       NVIDIA FLARE: a server and its sites; ``flare_job`` submits, ``flare_client`` is the training script
    processes   processor seconds, memory and bytes of each side's processes, observed from outside
    memory      peak memory of the coordinator with ten and with a thousand updates in a round
    page        ratios, and its section of docs/results/speed.md

``client``, ``grpc_*``, ``flower_app``, ``flare_job`` and ``flare_client`` run in processes of their own, without torch.
"""
