"""The page reports the failures that the SDK has, and no other text."""

from __future__ import annotations

import pytest

from sparrow.protocol.failures import FAILURES, explain
from sparrow.protocol.messages import PauseReason

pytestmark = pytest.mark.integration


def test_page_and_sdk_have_one_list(modules):
    found = modules("(found) => [found.FAILURES, found.PAUSES]", module="failures.js")
    assert found[0] == list(FAILURES)
    assert set(found[1]) <= {reason.value for reason in PauseReason}


ERRORS = {
    "new errors.DataError(text)": "data-unusable",
    "new errors.ProtocolError(text)": "bad-work",
    "new errors.ProtocolError(text, 'unknown-work')": "unknown-work",
    "new errors.BundleError(text)": "bad-payload",
    "new errors.BundleError(text, 'bad-payload/size')": "bad-payload/size",
    "new errors.TrainingDiverged(text, 'training-diverged/loss')": "training-diverged/loss",
    "new errors.TrainingDiverged(text, text)": "other",
    "new errors.Refused(422, 'BadContent', text)": "coordinator-fault",
    "new DOMException(text, 'QuotaExceededError')": "no-space",
    "new TypeError(text)": "program-error/TypeError",
    "new (class Secret extends TypeError {})(text)": "program-error/other",
    "new Error(text)": "other",
    "text": "program-error/other",
    "undefined": "program-error/other",
}


def test_an_error_is_reported_without_its_text(modules):
    made = ", ".join(f"found.failureOf({error})" for error in ERRORS)
    found = modules(
        f"""async (found) => {{
          const errors = await import("/web/errors.js"), text = "/home/ann/secret.csv";
          return [{made}];
        }}""",
        module="failures.js",
    )
    assert found == list(ERRORS.values())
    assert all(explain(failure) for failure in found)


def test_text_of_the_page_is_never_sent_as_a_reason(modules):
    found = modules(
        """async (found, given) => {
          const { Transport } = await import("/web/transport.js"), sent = [];
          const transport = new Transport(() => {});
          transport.call = async (method, path, { body }) => { sent.push(JSON.parse(new TextDecoder().decode(body))); };
          for (const reason of given) {
            await transport.handBack("a", reason);
            await transport.changeDevice("d", { conditions: { available: false, reason } });
          }
          await transport.changeDevice("d", { budget: 0.5, conditions: { available: true } });
          await transport.changeDevice("d", {});
          return sent;
        }""",
        module="failures.js",
        argument=["/home/ann/secret.csv", "", "charging", "bad-payload/size"],
    )
    wanted = []
    for reason in ("other", "other", "charging", "bad-payload/size"):
        wanted += [{"reason": reason}, {"conditions": {"available": False, "reason": reason}}]
    assert found == [*wanted, {"budget": 0.5, "conditions": {"available": True}}, {}]
