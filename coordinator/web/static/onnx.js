/** Fills a federation's ONNX skeleton with a model's weights: a skeleton's initializers have types and shapes alone. */
import { ProtocolError } from "./errors.js";

// Fields of the messages in onnx.proto
const MODEL_GRAPH = 7, GRAPH_INITIALIZER = 5, TENSOR_NAME = 8, TENSOR_RAW = 9;
const BYTES = 2; // the wire type of text, bytes and messages

/**
 * Return the model, Uint8Array. tensors: Map name -> typed array. Throws ProtocolError where the skeleton cannot be read,
 * or names a tensor that is not there.
 */
export function fillSkeleton(skeleton, tensors) {
  return mapped(skeleton, MODEL_GRAPH, (graph) => mapped(graph, GRAPH_INITIALIZER, (tensor) => filled(tensor, tensors)));
}

function filled(tensor, tensors) {
  const fields = [...fieldsOf(tensor)];
  const name = fields.find(({ number, body }) => number === TENSOR_NAME && body);
  const has = fields.some(({ number }) => number !== TENSOR_NAME && number > 2); // values of its own: a constant
  const values = name && tensors.get(new TextDecoder().decode(name.body));
  if (!values) {
    if (has) return tensor;
    throw new ProtocolError("the skeleton asks for a tensor that the model does not have; reload this page");
  }
  const raw = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  return joined([tensor, ...lengthDelimited(TENSOR_RAW, raw)]);
}

/** Return a message in which each field `wanted` is what `change` makes of it. */
function mapped(message, wanted, change) {
  const parts = [];
  for (const { number, whole, body } of fieldsOf(message)) {
    if (number !== wanted) parts.push(whole);
    else if (body) parts.push(...lengthDelimited(number, change(body)));
    else throw unreadable();
  }
  return joined(parts);
}

const unreadable = () => new ProtocolError("the skeleton cannot be read");

/** Yield the fields of a message: { number, whole, body }. */
function* fieldsOf(message) {
  let place = 0;
  const varint = () => {
    let value = 0, factor = 1;
    for (;;) {
      if (place >= message.length || factor > 2 ** 49) throw unreadable();
      const byte = message[place++];
      value += (byte & 127) * factor;
      if (byte < 128) return value;
      factor *= 128;
    }
  };
  while (place < message.length) {
    const begin = place, key = varint(), type = key % 8, number = Math.floor(key / 8);
    let body = null;
    if (type === 0) skipVarint();
    else if (type === 1) place += 8;
    else if (type === 5) place += 4;
    else if (type === BYTES) {
      const length = varint();
      body = message.subarray(place, place + length);
      place += length;
    } else throw unreadable();
    if (place > message.length) throw unreadable();
    yield { number, whole: message.subarray(begin, place), body };
  }

  function skipVarint() { // ten bytes where it is negative
    while (place < message.length && message[place] > 127) place++;
    place++;
  }
}

function lengthDelimited(number, body) {
  return [varintOf(number * 8 + BYTES), varintOf(body.length), body];
}

function varintOf(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Uint8Array.from([...bytes, value]);
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((all, part) => all + part.length, 0));
  let next = 0;
  for (const part of parts) {
    whole.set(part, next);
    next += part.length;
  }
  return whole;
}
