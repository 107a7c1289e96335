'use strict';

const SENTENCES = ['The beautiful woman does not want a red apple.', 'We often choose eighty-one small white flowers.',
  'I like to go to the park and play.'];
// Longest text that is drawn, and length to which it is repeated for the second measurement, in tokens.
const MOST = 40;
const LONG = 256;
// What the module calls its tensors, texts and rooms (src/exports.rs).
const DATA = { q: 0, k: 1, v: 2, out: 3, weights: 4, words: 5, message: 6 };
const ROOMS = { integers: 0, text: 1, numbers: 2 };
const FILES = ['config.json', 'model.safetensors', 'vocab.txt'];

const BERT_SIZES = ['vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'intermediate_size',
  'max_position_embeddings', 'type_vocab_size'];

const at = (id) => document.getElementById(id);
let module;
let tokenizer;

// The module stands in this page, packed and in base64, so that the page is one file and needs no server.
async function start() {
  const packed = await (await fetch(`data:;base64,${at('module').textContent.trim()}`)).blob();
  const bytes = await new Response(packed.stream().pipeThrough(new DecompressionStream('gzip'))).arrayBuffer();
  module = (await WebAssembly.instantiate(bytes, {})).instance.exports;
}

const text = (kind) => new TextDecoder().decode(new Uint8Array(module.memory.buffer, module.data(kind), module.len(kind)));
// A copy: the memory of the module moves when it grows.
const floats = (kind) => new Float32Array(module.memory.buffer, module.data(kind), module.len(kind)).slice();

function write(room, bytes) {
  const address = module.room(room, bytes.length);
  new Uint8Array(module.memory.buffer, address, bytes.length).set(bytes);
}

const writeIntegers = (integers) => write(ROOMS.integers, new Uint8Array(Uint32Array.from(integers).buffer));

function check(succeeded) {
  if (!succeeded) throw new Error(text(DATA.message));
}

// Tensors of a layer's attention on these tokens, from sdpa.
function weigh(tokens) {
  writeIntegers(tokens.map(({ id }) => id));
  check(module.weigh(Number(at('layer').value)));
  const [q, k, v] = [DATA.q, DATA.k, DATA.v].map(floats);
  const heads = module.heads();
  return { q, k, v, tokens: tokens.length, heads, dim: q.length / (tokens.length * heads) };
}

// Time of one attention both ways, and how far the results are apart, as a share of the largest value.
function measure(tensors) {
  const [out, weights] = [new Float32Array(tensors.q.length), new Float32Array(tensors.heads * tensors.tokens ** 2)];
  const ours = [DATA.weights, DATA.out].map(floats);
  plainAttention(tensors, out, weights);
  const largest = tensors.v.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
  const differences = [largestDifference(weights, ours[0]), largestDifference(out, ours[1]) / largest];
  const [sdpa, plain] = alternately([() => check(module.attend()), () => plainAttention(tensors, out)]);
  const again = largestDifference(floats(DATA.out), ours[1]);
  return { tokens: tensors.tokens, sdpa, plain, difference: Math.max(...differences), again };
}

function drawHeads(names, tensors) {
  const weights = floats(DATA.weights);
  const [maps, size, rest] = [at('maps'), names.length ** 2, at('pointed').dataset.rest];
  maps.classList.toggle('few', tensors.heads <= 4);
  maps.replaceChildren(...Array.from({ length: tensors.heads }, (_, head) => {
    const figure = document.createElement('figure');
    figure.innerHTML = `<figcaption>head ${head}</figcaption><canvas></canvas>`;
    return figure;
  }));
  [...maps.querySelectorAll('canvas')].forEach((canvas, head) => {
    const own = weights.subarray(head * size, (head + 1) * size);
    drawMap(canvas, names, own, (place) => {
      const [i, j] = place ?? [];
      at('pointed').textContent = place
        ? `head ${head}: ${names[i]} → ${names[j]} ${own[i * names.length + j].toFixed(3)}` : rest;
    });
  });
  const sum = (_, row) => weights.subarray(row * names.length, (row + 1) * names.length).reduce((a, b) => a + b, 0);
  return Array.from({ length: tensors.heads * names.length }, sum);
}

// Draws what is in the text field, then measures. Numbers are kept where a test finds them.
function show() {
  const { tokens: all, unknown } = tokenizer.split(at('text').value);
  const tokens = all.length > MOST ? [...all.slice(0, MOST - 1), all.at(-1)] : all;
  const notes = [];
  if (unknown.length) notes.push(`not among the words it knows: ${unknown.join(', ')}`);
  if (all.length > MOST) notes.push(`only the first ${MOST - 1} tokens and the last are shown`);
  at('note').textContent = notes.join('; ');
  const tensors = weigh(tokens);
  const sums = drawHeads(tokens.map(({ name }) => name), tensors);
  const short = measure(tensors);
  const long = measure(weigh(Array.from({ length: LONG }, (_, i) => tokens[i % tokens.length])));
  const shape = `${tensors.heads} heads of ${tensors.dim}`;
  at('times').replaceChildren(
    timeTable({ ...short, what: `This text: ${short.tokens} tokens, ${shape}` }),
    timeTable({ ...long, what: `Repeated to ${LONG} tokens` }),
  );
  const beyond = sums.reduce((most, sum) => Math.max(most, Math.abs(sum - 1)), 0);
  document.body.dataset.numbers = JSON.stringify({
    text: at('text').value, unknown, heads: tensors.heads, rows: sums.length, beyond, short, long,
  });
}

function say(message) {
  at('note').textContent = message;
  document.body.dataset.failure = message;
}

// Shows, and says what went wrong.
function update() {
  delete document.body.dataset.failure;
  try {
    show();
  } catch (error) {
    say(error.message);
  }
}

function opened(about, words) {
  at('about').textContent = about;
  at('layers').hidden = module.layers() < 2;
  at('layer').replaceChildren(...Array.from({ length: module.layers() }, (_, n) => new Option(n, n)));
  at('words').hidden = !words;
  if (words) {
    at('words').querySelector('summary').textContent = `The ${words.length} words it knows`;
    at('words').querySelector('p').textContent = words.join(' ');
  }
  update();
}

function openWords() {
  check(module.open_words());
  tokenizer = new WordList(text(DATA.words).split(' '));
  opened('The heads of a trained translator’s first layer. All is computed here, by the Rust crate sdpa in WebAssembly.',
    tokenizer.names.slice(1));
}

// Opens a BERT from its files, by name.
async function openBert(files) {
  const config = JSON.parse(await files['config.json'].text());
  await addTensors(files['model.safetensors']);
  if ((config.hidden_act ?? 'gelu') !== 'gelu') throw new Error(`config.json: hidden_act is ${config.hidden_act}, but must be gelu`);
  writeIntegers(BERT_SIZES.map((name) => config[name]));
  check(module.open_bert(config.layer_norm_eps ?? 1e-12));
  tokenizer = new WordPieces(await files['vocab.txt'].text());
  opened('The heads of each layer of a BERT. All is computed here, by the Rust crate sdpa in WebAssembly.');
}

// Hands over the tensors of a safetensors file: the length of a header in JSON, the header, numbers.
async function addTensors(file) {
  const bytes = async (start, end) => (await file.slice(start, end).arrayBuffer());
  const start = 8 + Number(new DataView(await bytes(0, 8)).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(await bytes(8, start)));
  for (const [name, { dtype, shape, data_offsets: [from, to] = [] }] of Object.entries(header)) {
    // Notes, and the numbers of positions, which are no weights.
    if (name === '__metadata__' || dtype === 'I64') continue;
    if (dtype !== 'F32') throw new Error(`${name}: ${dtype}, but must be F32`);
    write(ROOMS.text, new TextEncoder().encode(name));
    writeIntegers(shape);
    write(ROOMS.numbers, new Uint8Array(await bytes(start + from, start + to)));
    check(module.add_tensor());
  }
}

// Files of a model beside the page, or nothing: a page that is opened from a disk cannot fetch them.
async function filesBeside() {
  if (location.protocol === 'file:') return undefined;
  const found = await Promise.all(FILES.map((name) => fetch(name)));
  if (!found.every(({ ok }) => ok)) return undefined;
  const blobs = await Promise.all(found.map((answer) => answer.blob()));
  return Object.fromEntries(FILES.map((name, n) => [name, blobs[n]]));
}

function listen() {
  let waiting;
  at('text').oninput = () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 250);
  };
  at('form').onsubmit = (event) => event.preventDefault();
  at('layer').onchange = update;
  at('files').onchange = async ({ target }) => {
    const files = Object.fromEntries([...target.files].map((file) => [file.name, file]));
    const missing = FILES.filter((name) => !files[name]);
    if (missing.length) return say(`also needed: ${missing.join(', ')}`);
    return openBert(files).catch((error) => say(error.message));
  };
  at('examples').replaceChildren(...SENTENCES.map((sentence) => {
    const button = document.createElement('button');
    button.textContent = sentence;
    button.onclick = () => {
      at('text').value = sentence;
      update();
    };
    return button;
  }));
}

async function main() {
  at('pointed').dataset.rest = at('pointed').textContent;
  at('scale').style.background = `linear-gradient(to right, ${VIRIDIS.map((c) => `rgb(${c.join(' ')})`)})`;
  await start();
  listen();
  const files = await filesBeside();
  if (files) await openBert(files);
  else openWords();
}

main().catch((error) => say(error.message));
