"""GraSP, the device half: keep the weights that gradient flow needs, then train them as FedAvg does.

Wang, Zhang, Grosse, "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020, arXiv:2002.07376.
To take weight i away, δ = -θ_i, changes the squared norm of the gradient, by which training lowers the loss, by
2 δ (H g)_i to first order. So the device that prepares the model scores all weights on its training data's loss F,

    g = ∇F(θ),     H = ∇²F(θ),     score = θ ⊙ H g          with the outputs (logits) divided by a temperature, 200,

keeps the K = floor(density·n_w) largest scores over the whole network, and sends the weights it received under that
mask. Ordinary rounds are FedAvg's, or with a ``proximal_weight`` FedProx's.

Where the paper is silent, or its released code differs:

- F is the mean over all local samples, or over those of ``score_batches`` batches; the code draws as many of each class
  for it, which a device may not have. g is complete before H g begins: two passes over the same batches.
- The temperature divides any task's outputs. For a loss that is not of logits give 1.
- The network scores in training mode, as in the code, and in float32. Its running statistics stay as they were.
- A layer that would be left without a weight keeps its best one (``protocol.sparsity``).
"""

from __future__ import annotations

from edge_sdk.methods import DeviceMethod, Job, MethodSettings, Trained, UnknownWork, Update, torch_engine
from edge_sdk.methods.merging import whole_model
from edge_sdk.methods.whole import adapt_global, evaluate_global, train_pulled
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.masks import pack
from edge_sdk.protocol.sparsity import keep_by_score, weight_budget
from edge_sdk.tasks import count_examples

PASSES = 4
"""What scoring a sample computes, in training passes: one for g, one for the gradient that H g is differentiated from,
and two for that, since each of its products has two factors."""


class Settings(MethodSettings):
    """GraSP's own settings."""

    density: float
    temperature: float
    score_batches: int


def prepare(job: Job) -> Trained:
    """Score the weights and choose. Raises BundleError for a payload that does not fit, TrainingDiverged, and
    UnknownWork for a model that cannot be differentiated twice."""
    from edge_sdk.training.curvature import NoCurvature, Scoring

    received = whole_model(job.manifest, job.received)
    job.engine.load(received)
    own = job.own(Settings)
    scoring = Scoring(
        torch_engine(job), job.task.train, own.score_batches, own.temperature, job.seed("score"), job.progress
    )
    try:
        scored = scoring.scores()
    except NoCurvature as error:
        raise UnknownWork(f"GraSP differentiates the loss twice, which this model does not take: {error}") from error
    mask = keep_by_score(scored.scores, weight_budget(job.manifest, own.density))
    return Trained(
        state=job.state,
        update=Update(pack(job.manifest, received, mask), mask),
        num_examples=count_examples(job.task.train),
        steps=0,
        flops=PASSES * training_flops(job.manifest, scored.samples),
        train_loss=scored.loss,
        validation=None,
        stop_loss=None,
        stopped=False,
        counts={"prepare_pruned": mask.size - mask.count},
    )


GRASP = DeviceMethod(
    train=train_pulled,
    prepare=prepare,
    evaluate=evaluate_global,
    adapt=adapt_global,
    engines=("torch",),
    acts=("prepare_pruned",),
)
"""FedAvg of what one device kept; between rounds a device keeps nothing but the mask by name."""
