'use strict';

// Milliseconds that a call takes: as many as fill 10 ms, since clocks of browsers are coarse.
function timeOf(call) {
  const start = performance.now();
  let calls = 0;
  for (let batch = 1; ; batch *= 2) {
    for (let n = 0; n < batch; n++) call();
    calls += batch;
    const elapsed = performance.now() - start;
    if (elapsed >= 10) return elapsed / calls;
  }
}

// Times of calls, each the fastest of five, taken in turn.
function alternately(calls) {
  const rounds = Array.from({ length: 5 }, () => calls.map(timeOf));
  return calls.map((_, c) => Math.min(...rounds.map((round) => round[c])));
}

const inWords = (ms) => (ms < 1 ? `${(ms * 1000).toPrecision(3)} µs` : `${ms.toPrecision(3)} ms`);

// Two bars and what they say.
function timeTable({ what, sdpa, plain, difference }) {
  const longest = Math.max(sdpa, plain);
  const bar = (name, ms, kind) => `<span>${name}</span>
    <span class="bar ${kind}"><i style="width: ${(70 * ms) / longest}%"></i>${inWords(ms)}</span>`;
  const table = document.createElement('div');
  table.className = 'time';
  table.innerHTML = `<b>${what}</b>${bar('sdpa, WebAssembly', sdpa, 'ours')}${bar('JavaScript loops', plain, '')}
    <small>sdpa takes 1/${(plain / sdpa).toPrecision(2)} of the time; the largest difference of the results is ${
    difference.toExponential(1)}</small>`;
  return table;
}
