// Opens the page in a browser without a window, reads its numbers, and takes its picture:
// node examples/web/check.mjs BROWSER PAGE PICTURE [FOLDER OF A MODEL'S FILES]
import assert from 'node:assert/strict';
import { readFile, writeFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { basename, join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { openBrowser } from './browser.mjs';

const [program, page, picture, model] = process.argv.slice(2);

// Numbers that the page keeps once it has shown this text, or why it could not.
async function numbers(tab, text) {
  for (let tries = 0; tries < 600; tries++) {
    const { numbers, failure } = await tab.evaluate('({ ...document.body?.dataset })') ?? {};
    assert.equal(failure, undefined);
    const found = numbers && JSON.parse(numbers);
    if (found && (text === undefined || found.text === text)) return found;
    await new Promise((done) => setTimeout(done, 100));
  }
  throw new Error(`no numbers of ${text ?? 'the first text'} in a minute`);
}

// NaN is null in JSON, and null is less than any bound.
function checkWithin(value, bound, what) {
  assert.ok(typeof value === 'number' && value <= bound, `${what}: ${value}, more than ${bound}`);
}

function checkNumbers(found, { heads, tokens }) {
  assert.equal(found.heads, heads);
  assert.equal(found.short.tokens, tokens);
  assert.equal(found.rows, heads * tokens);
  checkWithin(found.beyond, 1e-6, 'largest difference of a sum of weights from 1');
  for (const measured of [found.short, found.long]) {
    checkWithin(measured.difference, 1e-5, 'largest difference of sdpa and the loops');
    assert.equal(measured.again, 0, 'with and without weights the output has the same bits');
    assert.ok(measured.sdpa > 0 && measured.plain > 0, `${measured.sdpa} ms and ${measured.plain} ms`);
  }
}

// The maps are drawn: as many as heads, each with cells of several colours, none of them grey as letters are.
async function checkMaps(tab, heads) {
  const maps = await tab.evaluate(`[...document.querySelectorAll('canvas')].map((canvas) => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const pixels = new Map();
    for (let at = 0; at < data.length; at += 4) {
      const [red, green, blue] = data.subarray(at, at + 3);
      const name = [red, green, blue].join();
      const isGrey = Math.max(red, green, blue) - Math.min(red, green, blue) < 30;
      if (!isGrey) pixels.set(name, (pixels.get(name) ?? 0) + 1);
    }
    const cells = [...pixels.values()].filter((count) => count > 100);
    return { colours: cells.length, share: cells.reduce((a, b) => a + b, 0) / (canvas.width * canvas.height) };
  })`);
  assert.equal(maps.length, heads);
  maps.forEach(({ colours, share }, head) => {
    assert.ok(colours >= 2 && share >= 0.3, `map ${head}: ${colours} colours on ${share} of its place`);
  });
}

function report(found) {
  const { text, heads, short, long } = found;
  const of = ({ tokens, sdpa, plain, difference }) =>
    `${tokens} tokens: sdpa ${sdpa.toFixed(4)} ms, loops ${plain.toFixed(4)} ms, apart ${difference.toExponential(1)}`;
  console.log(`${text}\n  ${heads} heads; ${of(short)}\n  ${of(long)}`);
}

async function checkWords(tab) {
  await tab.open(pathToFileURL(resolve(page)).href);
  const first = await numbers(tab);
  checkNumbers(first, { heads: 4, tokens: 10 });
  await checkMaps(tab, 4);
  report(first);
  await writeFile(picture, await tab.picture('#heads'));

  const text = "We can't often choose eighty-one small zebras";
  await tab.evaluate(`(() => {
    const field = document.getElementById('text');
    field.value = ${JSON.stringify(text)};
    field.dispatchEvent(new Event('input'));
  })()`);
  const second = await numbers(tab, text);
  checkNumbers(second, { heads: 4, tokens: 9 });
  assert.deepEqual(second.unknown, ['zebras']);
  report(second);
}

// The page beside a model's files takes these.
async function checkModel(tab) {
  const server = createServer(async ({ url }, answer) => {
    const name = basename(url) || 'index.html';
    const path = name === 'index.html' ? page : join(model, name);
    await readFile(path).then((bytes) => answer.end(bytes), () => answer.writeHead(404).end());
  });
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  await tab.open(`http://127.0.0.1:${server.address().port}/`);
  const found = await numbers(tab);
  checkNumbers(found, { heads: 12, tokens: 12 });
  await checkMaps(tab, 12);
  report(found);
  server.close();
  server.closeAllConnections();
}

const browser = await openBrowser(program);
try {
  await checkWords(browser.tab);
  if (model) await checkModel(browser.tab);
} finally {
  await browser.close();
}
