//! The example `select`: it runs, its errors fall with the number of keys, and it draws.

use crate::small::run;
use crate::temporary_folder::TemporaryFolder;

#[test]
fn more_keys_have_smaller_errors() {
    let folder = TemporaryFolder::new("select");
    let ran = run(&crate::program::build("select"), &folder, &["pictures".as_ref()]);
    assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    let text = String::from_utf8(ran.stdout).expect("UTF-8");
    // keys, weight, %, median error, largest error, time, ms, time of the last word, ms
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows = lines.filter(|words| words.len() == 9 && words[2] == "%" && words[8] == "ms");
    let rows: Vec<[f64; 4]> = rows.map(|words| [0, 1, 3, 4].map(|at| words[at].parse().expect("a number"))).collect();
    assert!(rows.len() > 5, "{text}");
    for pair in rows.windows(2) {
        let [fewer, more] = [pair[0], pair[1]];
        assert!(fewer[0] < more[0] && fewer[1] < more[1] && more[1] < 100.0, "weight: {text}");
        assert!(fewer[2] > more[2] && fewer[3] >= more[3], "errors: {text}");
    }
    let written = std::fs::read_dir(folder.file("pictures")).expect("the folder");
    let mut names: Vec<_> = written.map(|entry| entry.expect("a file").file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["select-error.png", "select-error.svg", "select-keys.png", "select-keys.svg"]);
}
