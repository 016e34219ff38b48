/**
 * Check a federation's publisher, its model, and the settings of each round (`edge_sdk/device/trust.py`). The page
 * remembers the first publisher (trust on first use) and refuses another one unless the link names it. If nothing is
 * signed, settings that change the content of an update must stay as at the first visit.
 *
 * A page cannot protect against the server that serves it, which can serve other code. These checks find mistakes, and
 * changes of the model or the settings by others than the page's server.
 */
import { BadPublication, ProtocolError, Refused } from "./errors.js";
import { Manifest } from "./manifest.js";
import { checkTerms, checkWeights, termsOf } from "./publication.js";
import { OPERATORS, binding, faults, leastSteps, shown } from "./ranges.js";
import { checkSignature, digestOf, fingerprint } from "./signatures.js";

const TRUST = "trust";
const NOTHING_SIGNED = new Map();

export class Trust {
  /** store: for the accepted publication. pinned: the fingerprint of the only publisher to accept, in groups, or null. */
  constructor(federation, store, pinned) {
    Object.assign(this, { federation, store, pinned });
    this.admitted = null;
    /** The reason why the last settings were refused; null if they were accepted. */
    this.refused = null;
  }

  /** Accept a federation, or throw BadPublication. fetch(): a promise of its publication. */
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

  /** Return the checked publication of a federation; null if it has none and needs none. */
  async publication(info, manifest, fetch, before) {
    const known = before?.publication ?? null, { federation, pinned } = this;
    if (info.publisher == null) {
      if (pinned !== null) {
        throw new BadPublication(`the model of ${federation} is not signed, but the link names the publisher ${pinned}; ` +
          "ask for a new link");
      }
      if (known) {
        throw new BadPublication(`the model of ${federation} was signed by ${fingerprint(known.publisher)} and is no longer ` +
          "signed: the coordinator may have replaced it. Ask its author before you train it");
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
      throw new BadPublication(`the coordinator names a publisher of ${federation} but has no publication; ask its operator`);
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
      throw new BadPublication(`the model of ${federation} is signed by ${now}, but the link names the publisher ${pinned}; ask for a new link`);
    }
    if (pinned === null && known && known.publisher !== publisher) {
      throw new BadPublication(`the model of ${federation} is signed by another publisher: ${now} instead of ` +
        `${fingerprint(known.publisher)}. If its author confirms this, open a link with the new publisher, or choose "Forget me"`);
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
      throw new BadPublication(`the manifest of ${this.federation} is not the one that its publisher signed`);
    }
    checkTerms(terms, this.federation, manifest, original);
  }

  checkEdition(before, terms) {
    if (terms.edition >= before.edition) return;
    throw new BadPublication(`the coordinator has replaced edition ${before.edition} of the model by edition ` +
      `${terms.edition}; ask its operator`);
  }

  /** Throw BadPublication for settings of a round that the publisher does not allow. */
  check(settings) {
    this.refused = this.wrongWith(settings, this.admitted);
    if (this.refused) throw new BadPublication(this.refused);
  }

  /** Return the reason why settings are not allowed, or null. */
  wrongWith(settings, { method, terms, settings: first }) {
    if (settings.secure === true) return "the round uses secure aggregation, which a page does not support; nothing is sent";
    if (settings.method !== method) return `the round uses the method ${shown(settings.method ?? null)}, the federation ${method}`;
    const signed = terms?.settings ?? NOTHING_SIGNED, wrong = faults(signed, settings);
    if (wrong.length) return `the publisher of the model did not sign this: ${wrong.join("; ")}`;
    const now = binding(settings);
    const changed = [...first].filter(([name, was]) => {
      const is = now.get(name) ?? null;
      return !OPERATORS.includes(name) && !signed.has(name) && is !== was && !morePrivate(name, was, is);
    }).map(([name, was]) => `${name} is ${shown(now.get(name) ?? null)}, was ${shown(was)}`);
    return changed.length ? `the coordinator changed settings since this page was first opened: ${changed.join("; ")}` : null;
  }

  /** Throw BadPublication for fewer local steps than the publisher allows. */
  checkSteps(steps) {
    const least = leastSteps(this.admitted.terms?.settings ?? NOTHING_SIGNED);
    if (steps >= least) return;
    throw new BadPublication(`a round would have ${steps} local steps on this device's data, but the publisher allows no fewer than ` +
      `${least}; give more samples`);
  }

  /**
   * Throw BadPublication unless the model of the first round has its published values. Checks only a whole model that was
   * not rounded. received: a decoded payload or null.
   */
  async checkFirstWeights(manifest, { round, settings }, received) {
    const { terms } = this.admitted;
    const exact = ["fp32", "int8"].includes(settings.precision); // int8 is for updates: models come in fp32
    const whole = received !== null && received.mask === null && manifest.said.outputs == null;
    // With a buffer, a device may receive the model of a later round.
    if (terms && round === 1 && exact && whole && settings.buffer == null) await checkWeights(terms, manifest, received.values);
  }

  /** The model's publisher, as a text for the user. */
  get line() {
    if (this.admitted === null) return null;
    const { publication, builtIn } = this.admitted;
    if (publication) return `signed by ${fingerprint(publication.publisher)}`;
    return builtIn ? "built in" : "not signed";
  }
}

/** Return whether a change of a setting makes an update reveal less. */
const morePrivate = (name, was, is) => ["secure", "secure_metrics"].includes(name) && is === true && !was;
