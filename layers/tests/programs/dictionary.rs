//! The soft dictionary: a plain one when cold, the fused call always, and clear about what it does not take.

use crate::counting::counted;
use crate::fixtures::{WIDTH, words};
use crate::support::{Rng, execs};
use sdpa::{Attention, Error, Exec, Inputs, Outputs, View, ViewMut};
use sdpa_layers::{Compute, Dictionary, Weighable};

fn filled<V: Weighable>(width: usize, temperature: f32, entries: Vec<(Vec<f32>, V)>) -> Dictionary<V> {
    let mut dictionary = Dictionary::new(width, temperature).expect("a good dictionary");
    for (key, value) in entries {
        dictionary.insert(&key, value).expect("a good entry");
    }
    dictionary
}

fn normals(n: usize, rng: &mut Rng) -> Vec<f32> {
    (0..n).map(|_| rng.normal()).collect()
}

/// Made to length 1, in f64.
fn units(rows: &[f32], width: usize) -> Vec<f32> {
    let unit = |row: &[f32]| {
        let norm = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        row.iter().map(|&x| (f64::from(x) / norm) as f32).collect::<Vec<_>>()
    };
    rows.chunks(width).flat_map(unit).collect()
}

#[test]
fn cold_it_is_a_plain_dictionary() {
    let words = words();
    for (_, exec) in execs() {
        let compute = &mut Compute::new(exec);
        let entries = words.iter().enumerate().map(|(i, (_, vector))| (vector.to_vec(), i as f32 + 0.5)).collect();
        let dictionary = filled(WIDTH, 1e-4, entries);
        assert_eq!(dictionary.len(), 184);
        for (i, (word, vector)) in words.iter().enumerate() {
            let found = dictionary.get(vector, compute).expect("found");
            assert_eq!((found.best, found.value), (i, i as f32 + 0.5), "{word}");
            assert_eq!((found.weights[i], found.weights.iter().sum::<f32>()), (1.0, 1.0), "{word}");
            assert!((found.similarity - 1.0).abs() < 1e-6, "{word}");
            assert_eq!(dictionary.value(i), Some(i as f32 + 0.5));
        }
        assert_eq!(dictionary.value(184), None);
    }
}

#[test]
fn warm_it_finds_what_is_alike() {
    let words = words();
    let without = |left_out: &str| {
        let kept = words.iter().filter(|&(word, _)| word != left_out);
        let (names, entries): (Vec<&str>, Vec<_>) = kept.map(|(w, v)| (w, (v.to_vec(), v.to_vec()))).unzip();
        (names, filled(WIDTH, 0.05, entries))
    };
    let compute = &mut Compute::default();
    let (names, dictionary) = without("colour");
    let found = dictionary.get(words.vector("colour"), compute).expect("found");
    assert_eq!(names[found.best], "color");
    assert!((found.similarity - 0.97).abs() < 0.01, "{}", found.similarity);
    let (names, dictionary) = without("performance");
    let found = dictionary.get(words.vector("performance"), compute).expect("found");
    let weight = |word| found.weights[names.iter().position(|&name| name == word).expect("there")];
    for like in ["speed", "horsepower"] {
        assert!(weight(like) > 10.0 * weight("color"), "{like} {}, color {}", weight(like), weight("color"));
    }
    assert!((found.weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    // The values are the vectors: their mean is like the query, too.
    assert_eq!(found.value.len(), WIDTH);
    let dot: f32 = units(&found.value, WIDTH).iter().zip(words.vector("performance")).map(|(a, b)| a * b).sum();
    assert!(dot > found.similarity, "{dot}");
}

#[test]
fn it_is_the_fused_call_on_unit_vectors_one_by_one_and_thousands_at_once() {
    const ENTRIES: usize = 700;
    const QUERIES: usize = 3001;
    const DIM: usize = 24;
    let mut rng = Rng::new(7);
    let (keys, values) = (normals(ENTRIES * DIM, &mut rng), normals(ENTRIES * 3, &mut rng));
    let queries = normals(QUERIES * DIM, &mut rng);
    let entries = keys.chunks(DIM).zip(values.as_chunks::<3>().0).map(|(k, &v)| (k.to_vec(), v)).collect();
    let dictionary = filled(DIM, 0.25, entries);
    let (unit_queries, unit_keys) = (units(&queries, DIM), units(&keys, DIM));
    for (isa, exec) in execs() {
        let compute = &mut Compute::new(exec.threads(2));
        let mut got = vec![0.0; QUERIES * 3];
        dictionary.get_many(&queries, &mut got, compute).expect("found");
        let view = |data, rows, dim| View::bhld(data, [1, 1, rows, dim]).expect("dense");
        let inputs =
            Inputs::new(view(&unit_queries, QUERIES, DIM), view(&unit_keys, ENTRIES, DIM), view(&values, ENTRIES, 3));
        let mut expected = vec![0.0; QUERIES * 3];
        let outputs = Outputs::new(ViewMut::bhld(&mut expected, [1, 1, QUERIES, 3]).expect("dense"));
        Attention::new().scale(1.0 / 0.25).problem(inputs, outputs).expect("a good call").run_once(exec);
        assert_eq!(got, expected, "{isa}");
        let best = dictionary.best_many(&queries, compute).expect("found");
        for i in (0..QUERIES).step_by(97) {
            let found = dictionary.get(&queries[i * DIM..(i + 1) * DIM], compute).expect("found");
            assert_eq!(found.value[..], got[i * 3..(i + 1) * 3], "{isa}, query {i}");
            assert_eq!(found.best, best[i], "{isa}, query {i}");
            let largest = found.weights.iter().copied().fold(0.0, f32::max);
            assert_eq!(found.weights[found.best], largest, "{isa}, query {i}");
        }
    }
}

#[test]
fn weights_of_many_queries_are_never_held() {
    const N: usize = 3000;
    let mut rng = Rng::new(8);
    let (keys, queries) = (normals(N * 8, &mut rng), normals(N * 8, &mut rng));
    let dictionary = filled(8, 0.5, keys.chunks(8).map(|key| (key.to_vec(), 1.0)).collect());
    let (mut compute, mut out) = (Compute::new(Exec::serial()), vec![0.0; N]);
    let (_, bytes) = counted(|| dictionary.get_many(&queries, &mut out, &mut compute).expect("found"));
    assert!(bytes < 2 << 20, "{bytes} bytes; N × N numbers are {}", N * N * 4);
    let (calls, _) = counted(|| dictionary.get_many(&queries, &mut out, &mut compute).expect("found"));
    assert_eq!(calls, 0, "a warm call allocates");
    let (_, bytes) = counted(|| assert!(dictionary.best_many(&queries, &mut compute).is_ok()));
    assert!(bytes < 2 << 20, "{bytes} bytes for the best; N × N numbers are {}", N * N * 4);
}

#[test]
fn lengths_of_vectors_do_not_count_however_extreme() {
    let entries = vec![(vec![1e-38, 0.0], [1.0]), (vec![0.0, 1e38], [2.0]), (vec![-3.0, -3.0], [4.0])];
    let mut dictionary = filled(2, 0.2, entries);
    let compute = &mut Compute::default();
    let small = dictionary.get(&[1e-42, 1e-42], compute).expect("found");
    let large = dictionary.get(&[1e38, 1e38], compute).expect("found");
    assert_eq!(small.best, 0, "the first of two equals");
    assert_eq!(small.weights[0], small.weights[1]);
    assert!((small.value[0] - large.value[0]).abs() < 1e-6);
    // As hot as can be, all weigh alike; as cold as can be, the best alone.
    dictionary.set_temperature(f32::MAX).expect("finite");
    assert!(dictionary.get(&[1.0, 0.0], compute).expect("found").weights.iter().all(|w| (w - 1.0 / 3.0).abs() < 1e-7));
    dictionary.set_temperature(1e-38).expect("its reciprocal is finite");
    assert_eq!(dictionary.get(&[1.0, 0.1], compute).expect("found").weights, [1.0, 0.0, 0.0]);
}

/// Two numbers by name: what a caller's own value may be.
#[derive(Debug, PartialEq)]
struct Car {
    price: f32,
    seats: f32,
}

impl Weighable for Car {
    fn write(&self, numbers: &mut Vec<f32>) {
        numbers.extend([self.price, self.seats]);
    }

    fn read(numbers: &[f32]) -> Self {
        Self { price: numbers[0], seats: numbers[1] }
    }
}

#[test]
fn values_are_whatever_can_be_weighed() {
    let car = |price, seats| Car { price, seats };
    let dictionary = filled(1, 1.0, vec![(vec![2.0], car(10.0, 2.0)), (vec![5.0], car(30.0, 6.0))]);
    assert_eq!(dictionary.get(&[1.0], &mut Compute::default()).expect("found").value, car(20.0, 4.0));
}

#[test]
fn what_it_refuses() {
    let nan = f32::NAN;
    for temperature in [0.0, -0.0, -1.0, f32::INFINITY, 1e-39, nan] {
        let Err(Error::Number { argument, got, expected }) = Dictionary::<f32>::new(2, temperature) else {
            panic!("{temperature} taken");
        };
        assert_eq!((argument, expected), ("temperature", "positive and, like 1/temperature, finite"));
        assert_eq!(got.to_bits(), temperature.to_bits());
    }
    assert_eq!(Dictionary::<f32>::new(0, 1.0).err(), Some(Error::Empty { argument: "dictionary", what: "width" }),);
    assert!(matches!(Dictionary::<f32>::new(usize::MAX, 1.0), Err(Error::Range { got: usize::MAX, .. })));

    let compute = &mut Compute::default();
    let mut dictionary = Dictionary::<Vec<f32>>::new(2, 1.0).expect("good");
    let empty = Error::Empty { argument: "dictionary", what: "number of entries" };
    assert!(dictionary.is_empty());
    assert_eq!(dictionary.get(&[1.0, 0.0], compute), Err(empty.clone()));
    assert_eq!(dictionary.get_many(&[], &mut [], compute), Err(empty.clone()));
    assert_eq!(dictionary.best_many(&[], compute), Err(empty));

    let said = |error: Result<(), Error>| error.expect_err("refused").to_string();
    assert_eq!(said(dictionary.insert(&[1.0], vec![1.0])), "key: width is 1, but the dictionary has 2");
    assert_eq!(said(dictionary.insert(&[1.0, 0.0], vec![])), "value: length is 0, but must be at least 1");
    let zero = "keys: norm of row 0 is 0, but must be positive and finite";
    assert_eq!(said(dictionary.insert(&[0.0, -0.0], vec![1.0])), zero);
    assert!(dictionary.is_empty(), "refused, and there all the same");
    dictionary.insert(&[1.0, 0.0], vec![1.0, 2.0]).expect("good");
    assert_eq!(said(dictionary.insert(&[0.0, 1.0], vec![1.0])), "value: length is 1, but the dictionary has 2");
    let infinite = "keys: norm of row 1 is inf, but must be positive and finite";
    assert_eq!(said(dictionary.insert(&[f32::INFINITY, 0.0], vec![1.0, 2.0])), infinite);
    assert_eq!(dictionary.len(), 1);

    let wrong = dictionary.get(&[1.0, 0.0, 0.0], compute).map(|_| ());
    assert_eq!(said(wrong), "query: width is 3, but the dictionary has 2");
    let wrong = dictionary.get(&[0.0, nan], compute).map(|_| ());
    assert_eq!(said(wrong), "query: norm of row 0 is NaN, but must be positive and finite");
    let mut out = [7.0; 4];
    let many = dictionary.get_many(&[1.0, 0.0, 0.0, 0.0], &mut out, compute);
    assert_eq!(said(many), "queries: norm of row 1 is 0, but must be positive and finite");
    let many = dictionary.get_many(&[1.0, 0.0, 1.0], &mut out, compute);
    assert_eq!(said(many), "queries: length is 3, but must be a multiple of 2, the width of the dictionary");
    let many = dictionary.get_many(&[1.0, 0.0], &mut out, compute);
    assert_eq!(said(many), "out: length is 4, but must be exactly 2, queries × value length");
    assert_eq!(out, [7.0; 4], "written, and refused all the same");
    assert!(dictionary.best_many(&[0.0, 0.0], compute).is_err());
    assert_eq!(dictionary.best_many(&[1.0, 0.0, -1.0, 0.0], compute), Ok(vec![0, 0]));
    assert_eq!(dictionary.best_many(&[], compute), Ok(vec![]));
    assert_eq!(dictionary.get_many(&[], &mut [], compute), Ok(()));
}
