'use strict';

// Attention in plain loops: softmax(q·kᵀ / √dim)·v of each head. q, k, v and out are [tokens, heads, dim]; weights, if they are
// wanted, [heads, tokens, tokens]. Numbers are read and written as f32, sums are JavaScript's own f64.
function plainAttention({ q, k, v, tokens, heads, dim }, out, weights) {
  const stride = heads * dim;
  const scale = 1 / Math.sqrt(dim);
  const row = new Float64Array(tokens);
  const mean = new Float64Array(dim);
  for (let h = 0; h < heads; h++) {
    for (let i = 0; i < tokens; i++) {
      const query = i * stride + h * dim;
      let largest = -Infinity;
      for (let j = 0; j < tokens; j++) {
        const key = j * stride + h * dim;
        let sum = 0;
        for (let c = 0; c < dim; c++) sum += q[query + c] * k[key + c];
        row[j] = sum * scale;
        if (row[j] > largest) largest = row[j];
      }
      let total = 0;
      for (let j = 0; j < tokens; j++) {
        row[j] = Math.exp(row[j] - largest);
        total += row[j];
      }
      mean.fill(0);
      for (let j = 0; j < tokens; j++) {
        const value = j * stride + h * dim;
        const weight = row[j] / total;
        for (let c = 0; c < dim; c++) mean[c] += weight * v[value + c];
        if (weights) weights[(h * tokens + i) * tokens + j] = weight;
      }
      for (let c = 0; c < dim; c++) out[query + c] = mean[c];
    }
  }
}

// Largest difference of two arrays; NaN if any number of either is NaN.
function largestDifference(a, b) {
  let largest = 0;
  for (let i = 0; i < a.length; i++) {
    const difference = Math.abs(a[i] - b[i]);
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}
