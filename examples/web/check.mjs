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

function checkNumbers(found, { heads, tokens }) {
  assert.equal(found.heads, heads);
  assert.equal(found.short.tokens, tokens);
  assert.equal(found.rows, heads * tokens);
  assert.ok(found.beyond <= 1e-6, `a row of weights is ${found.beyond} from 1`);
  for (const measured of [found.short, found.long]) {
    assert.ok(measured.difference <= found.bound, `sdpa and the loops differ by ${measured.difference}`);
    assert.equal(measured.again, 0, 'with and without weights the output has the same bits');
    assert.ok(measured.sdpa > 0 && measured.plain > 0, `${measured.sdpa} ms and ${measured.plain} ms`);
  }
}

// The maps are drawn: as many as heads, each of many colours.
async function checkMaps(tab, heads) {
  const colours = await tab.evaluate(`[...document.querySelectorAll('canvas')].map((canvas) => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  })`);
  assert.equal(colours.length, heads);
  colours.forEach((count, head) => assert.ok(count > 50, `map ${head} has ${count} colours`));
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
