/**
 * What a page accepts of a federation: its publisher, its model, and the settings of each round
 * (`edge_sdk/device/trust.py`). The first publisher that it meets is remembered (trust on first use); another one is
 * refused unless the link names it. Where nothing is signed, settings that change what an update holds must stay as they
 * were first met.
 *
 * A page never protects against the server that serves it, which can serve other code. These checks find mistakes, and a
 * model or settings that were changed behind a page that was not.
 */
import { BadPublication, ProtocolError, Refused } from "./errors.js";
import { Manifest } from "./manifest.js";
import { checkTerms, checkWeights, termsOf } from "./publication.js";
import { OPERATORS, binding, faults, leastSteps, shown } from "./ranges.js";
import { checkSignature, digestOf, fingerprint } from "./signatures.js";

const TRUST = "trust";
const NOTHING_SIGNED = new Map();

export class Trust {
  /** store: keeps what was accepted. pinned: the fingerprint of the only publisher to accept, in groups, or null. */
  constructor(federation, store, pinned) {
    Object.assign(this, { federation, store, pinned });
    this.admitted = null;
    /** Why the last settings were not accepted; null if they were. */
    this.refused = null;
  }

  /** Accept a federation as it is described, or throw BadPublication. fetch(): a promise of its publication. */
  async admit(info, manifest, fetch) {
    const kept = await this.store.get(TRUST), before = kept?.uid === info.uid ? kept : null;
    const publication = await this.publication(info, manifest, fetch, before);
    const settings = before?.settings ?? binding(info.settings);
    const admitted = {
      method: info.method, settings, publication, builtIn: publication === null && info.published_bytes === 0,
      terms: publication && termsOf(publication.statement),
    };
    const wrong = this.wrongWith(info.settings, admitted);
    if (wrong) throw new BadPublication(wrong);
    this.admitted = admitted;
    await this.store.put({ [TRUST]: { uid: info.uid, publication, model: manifest.digest, settings } });
  }

  /** Return the checked publication of a federation; null if it has none, and need not have one. */
  async publication(info, manifest, fetch, before) {
    const known = before?.publication ?? null, { federation, pinned } = this;
    if (info.publisher == null) {
      if (pinned !== null) {
        throw new BadPublication(`the model of ${federation} is not signed, and the link names the publisher ${pinned}; ` +
          "ask whoever gave you the link");
      }
      if (known) {
        throw new BadPublication(`the model of ${federation} was signed by ${fingerprint(known.publisher)} and is no longer ` +
          "signed; the coordinator may have replaced it. Nothing is trained");
      }
      return null;
    }
    // Two publishers may have signed the same statement.
    const same = known?.publisher === info.publisher && digestOf(known) === info.publication;
    if (same && before.model === manifest.digest) {
      this.checkPublisher(known, known);
      return known;
    }
    const { publication, manifest: published } = await fetch().catch((error) => {
      if (!(error instanceof Refused && error.is("NotFound"))) throw error;
      throw new BadPublication(`the coordinator has no publication of ${federation}, although it names a publisher`);
    });
    await checkSignature(publication);
    this.checkPublisher(publication, known);
    const terms = termsOf(publication.statement);
    this.checkModel(manifest, published, terms);
    if (known) this.checkEdition(termsOf(known.statement), terms);
    return publication;
  }

  checkPublisher({ publisher }, known) {
    const { federation, pinned } = this, now = fingerprint(publisher);
    if (pinned !== null && pinned !== now) {
      throw new BadPublication(`the model of ${federation} is signed by ${now}, and the link names the publisher ${pinned}`);
    }
    if (pinned === null && known && known.publisher !== publisher) {
      throw new BadPublication(`the model of ${federation} is signed by another publisher: ${now} in place of ` +
        `${fingerprint(known.publisher)}. If its author says so, open a link that names the new one, or choose "Forget me"`);
    }
  }

  checkModel(manifest, published, terms) {
    let original = manifest;
    if (published !== null) {
      try {
        original = new Manifest(published);
      } catch (error) {
        if (!(error instanceof ProtocolError)) throw error;
        throw new BadPublication("the published manifest cannot be read; reload this page");
      }
    }
    if (original.digest !== terms.manifest) {
      throw new BadPublication(`the manifest of ${this.federation} is not the one that its publisher has signed`);
    }
    checkTerms(terms, this.federation, manifest, original);
  }

  checkEdition(before, terms) {
    if (terms.edition >= before.edition) return;
    throw new BadPublication(`the coordinator has gone back from edition ${before.edition} of the model to ` +
      `${terms.edition}; nothing is trained`);
  }

  /** Throw BadPublication for settings of a round that the publisher does not allow. */
  check(settings) {
    this.refused = this.wrongWith(settings, this.admitted);
    if (this.refused) throw new BadPublication(this.refused);
  }

  /** Return what of settings is not allowed, or null. */
  wrongWith(settings, { method, terms, settings: first }) {
    if (settings.secure === true) return "the round has secure aggregation, which a page cannot do; nothing is sent";
    if (settings.method !== method) return `the round is one of ${shown(settings.method ?? null)}, the federation of ${method}`;
    const signed = terms?.settings ?? NOTHING_SIGNED, wrong = faults(signed, settings);
    if (wrong.length) return `the publisher of the model has not signed this: ${wrong.join("; ")}`;
    const now = binding(settings);
    const changed = [...first].filter(([name, was]) => {
      const is = now.get(name) ?? null;
      return !OPERATORS.includes(name) && !signed.has(name) && is !== was && !morePrivate(name, was, is);
    }).map(([name, was]) => `${name} is ${shown(now.get(name) ?? null)}, was ${shown(was)}`);
    return changed.length ? `the coordinator has changed settings since this page was first opened: ${changed.join("; ")}` : null;
  }

  /** Throw BadPublication for fewer local steps than the publisher allows. */
  checkSteps(steps) {
    const least = leastSteps(this.admitted.terms?.settings ?? NOTHING_SIGNED);
    if (steps >= least) return;
    throw new BadPublication(`a round would take ${steps} local steps on this device's data, and at least ${least} are ` +
      "allowed; give it more samples");
  }

  /**
   * Throw BadPublication unless the model of the first round begins as it was published. Looks only at a whole model that
   * came in its own values. received: a decoded payload or null.
   */
  async checkFirstWeights(manifest, { round, settings }, received) {
    const { terms } = this.admitted;
    const exact = ["fp32", "int8"].includes(settings.precision); // int8 is for updates: models come in fp32
    const whole = received !== null && received.mask === null && manifest.said.outputs == null;
    // With a buffer, a device may be given the model of a later round.
    if (terms && round === 1 && exact && whole && settings.buffer == null) await checkWeights(terms, manifest, received.values);
  }

  /** Who is trusted with the model, for a person. */
  get line() {
    if (this.admitted === null) return null;
    const { publication, builtIn } = this.admitted;
    if (publication) return `signed by ${fingerprint(publication.publisher)}`;
    return builtIn ? "built in" : "not signed";
  }
}

/** Return whether a setting has changed to one under which an update reveals less. */
const morePrivate = (name, was, is) => ["secure", "secure_metrics"].includes(name) && is === true && !was;
