/** Early stopping, and the choice of a device's best model: `edge_sdk/methods/early_stopping.py`. */

const SMOOTHING = 0.5;
const BEGUN = 0.1;
const MAY_LOSE = 0.25;

/**
 * Apply the federation's stop rule after a round. judge(): the validation result, { loss, accuracy }. memory: the
 * device's notes from before the round. Returns { memory, validation, stopLoss, stopped }.
 */
export async function judgeRound(judge, settings, memory, trainLoss, validate) {
  const rule = settings.early_stopping;
  const validation = validate || rule !== "off" ? await judge() : null;
  if (rule === "off") return { memory, validation, stopLoss: null, stopped: false };
  const patience = settings.patience ?? (rule === "paper" ? 1 : 10);
  if (rule === "paper") {
    const loss = settings.stop_weight * trainLoss + (1 - settings.stop_weight) * validation.loss;
    const rose = memory.last_loss != null && loss > memory.last_loss;
    const increases = rose ? memory.increases + 1 : 0;
    return { memory: { ...memory, last_loss: loss, increases }, validation, stopLoss: loss, stopped: increases >= patience };
  }
  const state = smoothed(memory, validation.loss, settings.min_improvement);
  const stopped = state.participations >= settings.min_participations && state.without_improvement >= patience;
  return { memory: { ...memory, ...state }, validation, stopLoss: state.smoothed_loss, stopped };
}

function smoothed(before, loss, minImprovement) {
  if (!before.participations) {
    return { participations: 1, first_loss: loss, smoothed_loss: loss, lowest_loss: loss, without_improvement: 0 };
  }
  const now = (1 - SMOOTHING) * before.smoothed_loss + SMOOTHING * loss;
  const improved = now < before.lowest_loss - minImprovement * Math.abs(before.lowest_loss);
  const lowest = improved ? now : before.lowest_loss;
  const begun = lowest < before.first_loss - BEGUN * Math.abs(before.first_loss);
  return {
    participations: before.participations + 1,
    first_loss: before.first_loss,
    smoothed_loss: now,
    lowest_loss: lowest,
    without_improvement: improved || !begun ? 0 : before.without_improvement + 1,
  };
}

/** Return whether an older model is kept: the round's loss exceeds the lowest one by more than a quarter. */
export function givesWay(found, lowest) {
  return found.loss - lowest > MAY_LOSE * Math.abs(lowest);
}
