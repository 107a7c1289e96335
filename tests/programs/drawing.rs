//! What examples draw with: the documents are well formed, say what they were given, and become PNGs of their size.

#[path = "../../examples/pictures/mod.rs"]
mod pictures;

use pictures::{
    Anchor, Axis, Bars, HeatMap, Labels, Level, LineChart, Picture, Scale, Series, Text, colour_bar, page, png, save,
    svg,
};
use std::path::Path;

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// The texts of a document, as a reader of XML sees them; panics unless it is one.
fn texts(picture: &Picture) -> Vec<String> {
    let svg = svg(picture);
    let document = roxmltree::Document::parse(&svg).unwrap_or_else(|e| panic!("{e}: {svg}"));
    let texts = document.descendants().filter(|node| node.has_tag_name("text"));
    texts.map(|node| node.text().unwrap_or_default().to_owned()).collect()
}

/// Width and height, by the header of a PNG.
fn size(png: &[u8]) -> (u32, u32) {
    assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
    assert_eq!(png[12..16], *b"IHDR");
    let number = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().expect("four bytes"));
    (number(16), number(20))
}

fn heat<'a>(rows: &'a [String], columns: &'a [String], values: &'a [f32], cell: f64) -> HeatMap<'a> {
    let (rows, columns) = (Labels::new("queries", rows), Labels::new("keys", columns));
    HeatMap { title: "a map", rows, columns, values, top: 1.0, cell }
}

#[test]
fn a_heat_map_shows_labels_and_values() {
    let (rows, columns) = (names(&["<b>", "R&D"]), names(&["\"x\"", "ß→∞", "last"]));
    let values = [0.0, 0.25, 0.5, 0.75, 1.0, f32::NAN];
    let large = heat(&rows, &columns, &values, 40.0).picture();
    let shown = texts(&large);
    for text in ["a map", "queries", "keys", "<b>", "R&D", "\"x\"", "ß→∞", "last", "0.00", "0.25", "0.75", "1.00"]
    {
        assert!(shown.iter().any(|t| t == text), "{text:?} is not among {shown:?}");
    }
    assert!(!shown.iter().any(|t| t.contains("NaN")), "{shown:?}");
    // The ends of viridis, and blank.
    for colour in ["#440154", "#fde725", "#eeeeee"] {
        assert!(svg(&large).contains(colour), "{colour}");
    }
    // No room for values.
    let small = heat(&rows, &columns, &values, 12.0).picture();
    assert!(!texts(&small).iter().any(|t| t == "0.25"));
    let hidden = HeatMap { rows: Labels::new("queries", &rows).hidden(), ..heat(&rows, &columns, &values, 12.0) };
    assert!(hidden.picture().width() < small.width());
    assert!(!texts(&hidden.picture()).iter().any(|t| t == "R&D" || t == "queries"));
}

#[test]
#[should_panic(expected = "a heat map of 1 rows and 2 columns")]
fn a_heat_map_of_another_size_is_refused() {
    heat(&names(&["a"]), &names(&["b", "c"]), &[0.0; 3], 9.0).picture();
}

#[test]
fn a_page_holds_its_panels_and_a_png_is_that_size() {
    let (rows, columns) = (names(&["a", "b"]), names(&["c"]));
    let panels = vec![heat(&rows, &columns, &[0.0, 1.0], 20.0).picture(); 5];
    let page = page("Five of them", "one\ntwo", 3, &panels, Some(colour_bar("weight", 0.5, 100.0)));
    let shown = texts(&page);
    assert_eq!(shown.iter().filter(|t| *t == "a map").count(), 5);
    for text in ["Five of them", "one", "two", "weight", "0.00", "0.50"] {
        assert!(shown.iter().any(|t| t == text), "{text:?} is not among {shown:?}");
    }
    assert!(page.width() > 3.0 * panels[0].width() && page.height() > 2.0 * panels[0].height());
    let (width, height) = size(&png(&page).expect("a PNG"));
    for (pixels, length) in [(width, page.width()), (height, page.height())] {
        assert!((f64::from(pixels) - 1.5 * length.ceil()).abs() <= 1.0, "{pixels} pixels for {length}");
    }
}

#[test]
fn text_that_is_not_xml_becomes_xml() {
    let mut picture = Picture::new(100.0, 20.0);
    let nasty = "</text><script>&\u{0}\u{1b}\"'";
    picture.text(0.0, 15.0, nasty, Text { anchor: Anchor::Middle, turn: -45.0, ..Text::default() });
    assert_eq!(texts(&picture), ["</text><script>&\u{fffd}\u{fffd}\"'"]);
}

/// Letters make a mark: the font is there.
#[test]
fn a_png_has_its_text() {
    let mut picture = Picture::new(60.0, 20.0);
    let blank = png(&picture).expect("a PNG");
    picture.text(2.0, 15.0, "text", Text::default());
    assert!(png(&picture).expect("a PNG").len() > blank.len() + 100);
}

#[test]
fn bars_show_numbers_and_leave_out_what_is_not_there() {
    let labels = names(&["one", "two", "three", "none"]);
    let bars = Bars {
        title: "bars",
        labels: Labels::new("", &labels),
        values: &[0.25, 0.75, f32::NAN, 0.001],
        top: 1.0,
        length: 100.0,
    };
    assert_eq!(texts(&bars.picture()), ["bars", "one", "0.25", "two", "0.75", "three", "none"]);
    assert!(svg(&bars.picture()).contains(r#"width="75""#));
}

/// Speed against length, made up.
fn sweep() -> Picture {
    let line = |scale: f64| (5..15).map(|n| (2f64.powi(n), scale * f64::from(n) / (4.0 + f64::from(n)))).collect();
    let lines: [Vec<(f64, f64)>; 3] = [line(130.0), line(70.0), line(4.0)];
    let series = ["fused, avx512", "unfused", "naive"];
    let series: Vec<Series<'_>> = series.iter().zip(&lines).map(|(&name, points)| Series { name, points }).collect();
    LineChart {
        title: "made up: 12 heads of 64",
        x: Axis { title: "rows and keys", scale: Scale::Log2 },
        y: Axis { title: "GFLOP/s", scale: Scale::Log10 },
        series: &series,
        levels: &[Level { name: "peak, 118.2 GFLOP/s", y: 118.2 }],
        size: (520.0, 300.0),
    }
    .picture()
}

#[test]
fn a_chart_has_ticks_legend_and_levels() {
    let page = page("Made up", "to be looked at", 1, &[sweep()], None);
    save(&page, Path::new(env!("CARGO_TARGET_TMPDIR")), "chart").expect("written");
    let shown = texts(&page);
    for text in ["fused, avx512", "naive", "peak, 118.2 GFLOP/s", "32", "16384", "2", "10", "100", "GFLOP/s"] {
        assert!(shown.iter().any(|t| t == text), "{text:?} is not among {shown:?}");
    }
    assert!(svg(&page).contains("stroke-dasharray"));
}

#[test]
fn a_line_breaks_where_an_axis_cannot_show_a_point() {
    let points = [(1.0, 1.0), (2.0, 2.0), (3.0, f64::NAN), (4.0, 4.0), (5.0, 0.0), (6.0, -1.0)];
    let series = [Series { name: "s", points: &points }];
    let chart = |scale| LineChart {
        title: "",
        x: Axis { title: "", scale: Scale::Linear },
        y: Axis { title: "", scale },
        series: &series,
        levels: &[],
        size: (100.0, 100.0),
    };
    let lines = |scale| svg(&chart(scale).picture()).matches(r##"stroke="#0072b2""##).count();
    assert_eq!(lines(Scale::Linear), 2 + 1, "two runs and the legend");
    assert_eq!(lines(Scale::Log10), 2 + 1, "two runs and the legend");
    let broken = svg(&chart(Scale::Log10).picture());
    assert!(!broken.contains("NaN") && !broken.contains("inf"), "{broken}");
    // Nothing to show at all is a frame, not a failure.
    let none = svg(&LineChart { series: &[], ..chart(Scale::Log2) }.picture());
    assert!(!none.contains("NaN") && !none.contains("inf"), "{none}");
}

#[test]
fn ticks_are_round_and_enclose() {
    let ticks = |scale: Scale, values: &[f64], about| scale.range(values.iter().copied(), about).ticks;
    assert_eq!(ticks(Scale::Linear, &[0.3, 1.0], 5), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
    assert_eq!(ticks(Scale::Linear, &[-3.0, 7.0], 5), [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0]);
    assert_eq!(ticks(Scale::Linear, &[5.0], 5), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(ticks(Scale::Log2, &[64.0, 1024.0], 10), [64.0, 128.0, 256.0, 512.0, 1024.0]);
    assert_eq!(ticks(Scale::Log2, &[100.0, 1000.0], 10), [64.0, 128.0, 256.0, 512.0, 1024.0]);
    assert_eq!(ticks(Scale::Log10, &[3.0, 118.0], 7), [2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
    assert_eq!(ticks(Scale::Log10, &[1e-3, 1e5], 5), [1e-3, 1e-1, 1e1, 1e3, 1e5].map(|t: f64| t));
    let range = Scale::Log2.range([64.0, 1024.0].into_iter(), 10);
    assert_eq!((range.share(64.0), range.share(256.0), range.share(1024.0)), (0.0, 0.5, 1.0));
}
