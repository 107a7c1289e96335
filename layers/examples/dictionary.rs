//! A soft dictionary of 184 words: look-up by likeness, which is what attention is.
//!
//! ```text
//! cargo run --release -p sdpa-layers --example dictionary
//! ```

#[path = "../../examples/arguments/mod.rs"]
mod arguments;
#[path = "../../examples/fixtures/mod.rs"]
mod fixtures;

use arguments::{Output, Program};
use fixtures::{WIDTH, Words, words};
use sdpa::Error;
use sdpa_layers::{Compute, Dictionary};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let about = "Looks words up by likeness, in a soft dictionary of 184 words.";
    Program { name: "dictionary", about, flags: &[], output: Output::Text }.run(|_| Ok(run()?))
}

fn run() -> Result<(), Error> {
    let (words, mut compute) = (words(), Compute::default());
    println!("Keys: the vectors of {} words, {WIDTH} numbers each (all-MiniLM-L6-v2).", words.words.len());
    println!("A query finds every key; the weights are softmax(cosine / temperature).");
    alike(&words, &mut compute)?;
    temperatures(&words, &mut compute)?;
    prices(&words, &mut compute)?;
    thousands(&words, &mut compute)
}

/// All words but one, and their names.
fn without<'a>(words: &'a Words, left_out: &str, temperature: f32) -> Result<(Vec<&'a str>, Dictionary<f32>), Error> {
    let mut dictionary = Dictionary::new(WIDTH, temperature)?;
    let mut names = Vec::new();
    for (word, vector) in words.iter().filter(|&(word, _)| word != left_out) {
        dictionary.insert(vector, 0.0)?;
        names.push(word);
    }
    Ok((names, dictionary))
}

fn alike(words: &Words, compute: &mut Compute) -> Result<(), Error> {
    println!("\nWords that are not in it, at temperature 0.05. Best key (cosine), then weights:");
    for query in ["colour", "performance", "queen", "cheap", "drink"] {
        let (names, dictionary) = without(words, query, 0.05)?;
        let found = dictionary.get(words.vector(query), compute)?;
        let mut order: Vec<usize> = (0..names.len()).collect();
        order.sort_by(|&a, &b| found.weights[b].total_cmp(&found.weights[a]));
        print!("  {query:<12} {:<11} ({:.2})  ", names[found.best], found.similarity);
        let listed = order.iter().take(4).map(|&i| format!("{} {:.3}", names[i], found.weights[i]));
        println!("{}", listed.collect::<Vec<_>>().join(", "));
        if query == "performance" {
            let weight = |word| found.weights[names.iter().position(|&name| name == word).expect("a word of it")];
            let of = ["speed", "horsepower", "color"].map(|word| format!("{word} {:.5}", weight(word)));
            println!("  {:<32}{}", "", of.join(", "));
        }
    }
    Ok(())
}

fn temperatures(words: &Words, compute: &mut Compute) -> Result<(), Error> {
    println!("\nThe lower the temperature, the more the best takes (\"performance\", then \"speed\", which is a key):");
    let (names, mut dictionary) = without(words, "performance", 1.0)?;
    for temperature in [1.0, 0.1, 0.05, 0.01, 0.001] {
        dictionary.set_temperature(temperature)?;
        let found = dictionary.get(words.vector("performance"), compute)?;
        let exact = dictionary.get(words.vector("speed"), compute)?;
        print!("  {temperature:<6} {} {:.4}", names[found.best], found.weights[found.best]);
        println!("   {} {}", names[exact.best], exact.weights[exact.best]);
    }
    Ok(())
}

fn prices(words: &Words, compute: &mut Compute) -> Result<(), Error> {
    let list = [("coffee", 3.0), ("tea", 2.0), ("bread", 4.0), ("fish", 15.0), ("bicycle", 500.0)];
    let mut prices = Dictionary::new(WIDTH, 0.03)?;
    for (word, price) in list {
        prices.insert(words.vector(word), price)?;
    }
    println!("\nA price list of {}; what others might cost, at 0.03:", list.map(|(word, _)| word).join(", "));
    for query in ["coffee", "drink", "food", "sea", "wheel"] {
        let found = prices.get(words.vector(query), compute)?;
        println!("  {query:<8} {:>9.2}   mostly {} {:.2}", found.value, list[found.best].0, found.weights[found.best]);
    }
    Ok(())
}

/// Vectors under vectors, and queries by the thousand: one fused call.
fn thousands(words: &Words, compute: &mut Compute) -> Result<(), Error> {
    const QUERIES: usize = 20_000;
    let mut dictionary = Dictionary::new(WIDTH, 0.05)?;
    for (_, vector) in words.iter() {
        dictionary.insert(vector, vector.to_vec())?;
    }
    // Halfway between two words, each pair in turn.
    let word = |i: usize| &words.vectors[i % words.words.len() * WIDTH..][..WIDTH];
    let halfway = |i: usize| word(i).iter().zip(word(i / words.words.len() * 7 + i + 1)).map(|(a, b)| a + b);
    let queries: Vec<f32> = (0..QUERIES).flat_map(halfway).collect();
    let mut values = vec![0.0; QUERIES * WIDTH];
    let start = Instant::now();
    dictionary.get_many(&queries, &mut values, compute)?;
    let time = start.elapsed();
    let one = dictionary.get(&queries[12_345 * WIDTH..][..WIDTH], compute)?;
    assert_eq!(one.value, values[12_345 * WIDTH..][..WIDTH], "one by one or together, the bits are the same");
    println!("\n{QUERIES} queries with vectors as values, in one fused call: {} ms.", time.as_millis());
    println!(
        "Their {} weights are never held; looked up alone, number 12345 gets the same bits.",
        QUERIES * words.words.len()
    );
    Ok(())
}
