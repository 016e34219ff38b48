/**
 * Fill a federation's ONNX skeleton with a model's weights, and prepend its preparation (`export/preparation.py`). A
 * skeleton's initializers have only types and shapes.
 */
import { ProtocolError } from "./errors.js";
import { utf8 } from "./sha256.js";

// Fields of the messages in onnx.proto
const MODEL_GRAPH = 7, MODEL_OPSET = 8, MODEL_METADATA = 14, MODEL_FUNCTIONS = 25;
const GRAPH_NODE = 1, GRAPH_INITIALIZER = 5, GRAPH_INPUT = 11, GRAPH_OUTPUT = 12, GRAPH_VALUE = 13;
const NODE_INPUT = 1, NODE_OUTPUT = 2, NODE_NAME = 3, NODE_ATTRIBUTE = 5, ATTRIBUTE_GRAPH = 6, ATTRIBUTE_GRAPHS = 11;
const VALUE_NAME = 1, TENSOR_NAME = 8, TENSOR_RAW = 9, ENTRY_KEY = 1, ENTRY_VALUE = 2;
const BYTES = 2; // the wire type of text, bytes and messages

/**
 * Return the model, Uint8Array. tensors: Map name -> typed array. Throws ProtocolError if the skeleton cannot be read
 * or names an unknown tensor.
 */
export function fillSkeleton(skeleton, tensors) {
  const graph = (message) => mapped(message, { [GRAPH_INITIALIZER]: (tensor) => filled(tensor, tensors) });
  return mapped(skeleton, { [MODEL_GRAPH]: graph });
}

function filled(tensor, tensors) {
  const fields = fieldsIn(tensor);
  const name = fields.find(({ number, body }) => number === TENSOR_NAME && body);
  const has = fields.some(({ number }) => number !== TENSOR_NAME && number > 2); // values of its own: a constant
  const values = name && tensors.get(new TextDecoder().decode(name.body));
  if (!values) {
    if (has) return tensor;
    throw new ProtocolError("the skeleton has a tensor that the model does not have; reload this page");
  }
  const raw = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  return joined([tensor, ...lengthDelimited(TENSOR_RAW, raw)]);
}

const PREFIX = "prepare/", INPUT = "input", OUTPUT = "output";

/**
 * Return a model, Uint8Array, with `properties` (name -> text) and, in front, `preparation`, an ONNX file or null. Its
 * input is then the raw one, and the preparation's other names get the prefix `prepare/`. Throws ProtocolError if the two
 * cannot be combined.
 */
export function compose(model, preparation, properties) {
  const said = Object.entries(properties).flatMap(([key, value]) => {
    const entry = [...lengthDelimited(ENTRY_KEY, utf8(key)), ...lengthDelimited(ENTRY_VALUE, utf8(value))];
    return lengthDelimited(MODEL_METADATA, joined(entry));
  });
  if (!preparation) return joined([model, ...said]);
  const [behind, front] = [model, preparation].map(opsetsOf);
  if (String(behind) !== String(front)) throw new ProtocolError("preparation and model use different versions of operators");
  const graph = graphOf(preparation);
  const together = mapped(model, { [MODEL_GRAPH]: (own) => composed(own, graph) });
  return joined([together, ...said]);
}

/** Return the model's graph after the preparation's; nodes stay in topological order. */
function composed(model, preparation) {
  const prefixed = renamed((name) => (name === "" || name === INPUT ? name : PREFIX + name));
  const behind = renamed((name) => (name === INPUT ? PREFIX + OUTPUT : name));
  const kept = [GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_VALUE];
  const front = fieldsIn(prefixed(preparation)).filter(({ number }) => kept.includes(number));
  const own = fieldsIn(behind(model)).filter(({ number }) => number !== GRAPH_INPUT);
  return joined([...front, ...own].map(({ whole }) => whole));
}

/** Return a function that renames every value and node of a graph and its subgraphs. */
function renamed(rename) {
  const text = (bytes) => utf8(rename(new TextDecoder().decode(bytes)));
  const node = (message) => mapped(message, {
    [NODE_INPUT]: text, [NODE_OUTPUT]: text, [NODE_NAME]: text,
    [NODE_ATTRIBUTE]: (attribute) => mapped(attribute, { [ATTRIBUTE_GRAPH]: graph, [ATTRIBUTE_GRAPHS]: graph }),
  });
  const value = (message) => mapped(message, { [VALUE_NAME]: text });
  function graph(message) {
    return mapped(message, {
      [GRAPH_NODE]: node, [GRAPH_INITIALIZER]: (tensor) => mapped(tensor, { [TENSOR_NAME]: text }),
      [GRAPH_INPUT]: value, [GRAPH_OUTPUT]: value, [GRAPH_VALUE]: value,
    });
  }
  return graph;
}

/** Return the operator sets of a model, as texts in order. */
function opsetsOf(model) {
  return fieldsIn(model).filter(({ number }) => number === MODEL_OPSET).map(({ body }) => String(body)).sort();
}

function graphOf(model) {
  const fields = fieldsIn(model), graphs = fields.filter(({ number }) => number === MODEL_GRAPH);
  if (graphs.length !== 1 || !graphs[0].body || fields.some(({ number }) => number === MODEL_FUNCTIONS)) throw unreadable();
  return graphs[0].body;
}

/** Return a message with changed fields. changes: number of a field -> function. */
function mapped(message, changes) {
  const parts = [];
  for (const { number, whole, body } of fieldsOf(message)) {
    if (!changes[number]) parts.push(whole);
    else if (body) parts.push(...lengthDelimited(number, changes[number](body)));
    else throw unreadable();
  }
  return joined(parts);
}

const unreadable = () => new ProtocolError("the model's ONNX file cannot be read");

const fieldsIn = (message) => [...fieldsOf(message)];

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
