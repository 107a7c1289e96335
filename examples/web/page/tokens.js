'use strict';

// Texts to tokens: { tokens: [{ id, name }], unknown: [word] }.

// Words of a list; the first is the mark of the end. Texts are cut as the translator's (layers/examples/translate/words.rs).
class WordList {
  constructor(names) {
    this.names = names;
    this.ids = new Map(names.map((name, id) => [name, id]));
  }

  split(text) {
    const plain = text.toLowerCase().replaceAll('’', "'").replaceAll('cannot', 'can not').replaceAll("can't", 'can not')
      .replaceAll("n't", ' not').replaceAll("i'm", 'i am');
    const words = plain.split(/[\s.,;:!?"\-–()]+/).filter((word) => word);
    const [known, unknown] = [words.filter((word) => this.ids.get(word)), words.filter((word) => !this.ids.get(word))];
    const tokens = [...known, this.names[0]].map((name) => ({ id: this.ids.get(name), name }));
    return { tokens, unknown };
  }
}

// Pieces of words as BERT cuts them (WordPiece, small letters without accents), from a vocab.txt.
class WordPieces {
  constructor(vocabulary) {
    this.names = vocabulary.split('\n').map((line) => line.trimEnd());
    this.ids = new Map(this.names.map((name, id) => [name, id]));
  }

  split(text) {
    const plain = text.toLowerCase().normalize('NFD').replace(/\p{Mn}/gu, '');
    const words = plain.match(/[\p{P}$+<=>^`|~\p{Script=Han}]|[^\s\p{P}$+<=>^`|~\p{Script=Han}]+/gu) ?? [];
    const names = ['[CLS]', ...words.flatMap((word) => this.pieces(word)), '[SEP]'];
    return { tokens: names.map((name) => ({ id: this.ids.get(name), name })), unknown: [] };
  }

  // The longest piece of the vocabulary that the rest of the word begins with, until nothing is left.
  pieces(word) {
    const pieces = [];
    for (let start = 0; start < word.length;) {
      const mark = start ? '##' : '';
      let end = word.length;
      while (end > start && !this.ids.has(mark + word.slice(start, end))) end--;
      if (end === start) return ['[UNK]'];
      pieces.push(mark + word.slice(start, end));
      start = end;
    }
    return pieces;
  }
}
