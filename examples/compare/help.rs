//! Text of `--help`.

pub(crate) const HELP: &str = "\
Compares every way this crate computes attention: naive, unfused, and fused on each instruction set.

Usage: compare [OPTIONS] [FILE.safetensors]
       compare --sweep [OPTIONS] [DIR]

  FILE.safetensors           tensors q [B,H,Lq,D], k [B,Hkv,Lk,D], v [B,Hkv,Lk,Dv], all f32, bf16
                             or f16; and if it has them:
                               bias f32 and mask bool or u8 (nonzero keeps), [B or 1,H or 1,Lq or 1,Lk or 1];
                               sinks and alibi_slopes f32 [H]; kv_lens, integers [B];
                               selected i32 [B,H or Hkv or 1,groups of rows,places], the keys that rows select (-1: none), and
                               selected_lens i32 [B*groups or B], the places that count
  --shape B,H,HKV,LQ,LK,D,DV unit-normal data of this shape, from a fixed seed
                             (with neither: layer 3 of all-MiniLM-L6-v2 on a paragraph of 268 tokens)

  --scale X                  factor of the dot products, in place of 1/sqrt(D)
  --causal                   a row sees the keys up to its own position only
  --align WHERE              where the rows stand among the keys: top-left, bottom-right, or the number of keys
                             before the first row (may be negative)
  --window L,R               a row sees L keys before its own position and R after it; - for all on that side
  --softcap X                scores become X*tanh(score/X)
  --selected ROWS,UNIT       a list of selected keys is for ROWS neighbouring rows, and its numbers count units of UNIT keys
                             (default: 1,1); with lists, the table has the time of the call without them, too, and no
                             GFLOP/s; not with --backward

  --dtype f32|bf16|f16       fused paths read q, k and v in this type, the others the same numbers in f32
                             (default: the file's, otherwise f32)
  --precision exact|native|accurate
                             with native, fused paths multiply bf16 by the machine's own instruction if it has a fast one;
                             with accurate, all types by its matrix unit, in parts (default: exact); not with --backward

  --only fused|naive|unfused time this path only
  --isa NAME                 fused on this instruction set only: portable, avx2, avx512, amx, neon
  --threads N                on N threads only (default: on one, and on all)
  --repeat N                 runs of each path (default: about a second's worth, at least 3)

  --output OUT.safetensors   write out [B,H,Lq,Dv] and lse [B,H,Lq] of the fused path, f32
  --weights                  write the weights too, [B,H,Lq,Lk]; the paths are timed without
  --scores POINT             write the scores too, as scores.POINT; raw, softcap or masked; may be given for each

  --backward                 time the backward pass, too, and check every gradient; the file may also hold d_out
                             [B,H,Lq,Dv] and d_lse [B,H,Lq] f32 (else d_out is made up); --output writes dq, dk, dv and,
                             where the option is there, dbias, dsinks, dalibi_slopes

  --explain                  say for each fused path what it does and why, and how long it must take at least
  --json                     one JSON object a line for each path, instead of the table
  --help                     this

  --sweep                    draw GFLOP/s against length: sweep.svg, sweep.png and, with every number, sweep.csv, into
                             DIR or else target/pictures. About two minutes; answers are not checked; goes with
                             --only, --isa, --threads, --repeat, --dtype and --precision
  --lengths N,N,...          of these rows and keys (default: 16, 32, 64 and so on to 16384)
  --dims N,N,...             on heads of these sizes (default: 32, 64, 128, 256)

Exit status: 0 if every error of a fused path is within its bound, 1 if one is not, 2 if an argument, a file or a shape is
wrong, or so many threads cannot be started. Errors of the other paths that are beyond it are marked.
";
