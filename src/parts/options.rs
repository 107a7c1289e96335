//! Options of a call as data, to compare those of its parts. Fields are taken apart by name, so that none is left out.

use crate::attention::Attention;
use crate::inputs::Inputs;
use crate::parts::Datum;
use sdpa_kernels::{Alignment, Causality, Cover, Covered, Dropout, Mask, Visible};

impl Attention {
    /// Returns the settings, each with its name: to compare those of parts of one call.
    ///
    /// ```
    /// use sdpa::{Attention, parts::Datum};
    /// let settings = Attention::new().softcap(30.0).settings();
    /// assert!(settings.contains(&("softcap", Datum::from(30.0f32))));
    /// assert!(settings.contains(&("causal rule", Datum::default())));
    /// ```
    pub fn settings(&self) -> Vec<(&'static str, Datum)> {
        let Self { scale, softcap, visible, alignment, precision, dropout, dropout_from } = *self;
        let Visible { causality, window } = visible;
        let [left, right] = window.map_or([None; 2], |window| window.sides());
        let [p, seed, offset] = match dropout {
            Some(Dropout { p, seed, offset }) => [p.into(), seed.into(), u64::from(offset).into()],
            None => Default::default(),
        };
        let alignment: Datum = match alignment {
            None => Datum::default(),
            Some(Alignment::TopLeft) => "top-left".into(),
            Some(Alignment::BottomRight) => "bottom-right".into(),
            Some(offset) => offset.offset(0, 0).into(),
        };
        vec![
            ("scale", scale.map_or("1/√head_dim".into(), Datum::from)),
            ("softcap", softcap.into()),
            ("causal rule", (causality == Causality::Causal).then_some("causal").into()),
            ("window left", left.into()),
            ("window right", right.into()),
            ("window keep_first", window.map(|window| window.kept_first()).into()),
            ("alignment", alignment),
            ("precision", precision.to_string().as_str().into()),
            ("dropout p", p),
            ("dropout seed", seed),
            ("dropout offset", offset),
            ("first row and key of dropout", (&dropout_from[..]).into()),
        ]
    }
}

impl Inputs<'_> {
    /// Returns the options that inputs can have, each with its name: to compare the inputs of parts of one call. Of biases and
    /// masks the kind and the columns alone are told, of lists of selected keys that there are some.
    ///
    /// ```
    /// use sdpa::{Inputs, View, parts::Datum};
    /// let (x, slopes) = ([0.0; 2 * 8], [0.5f32, 0.25]);
    /// let x = View::bhld(&x, [1, 2, 1, 8])?;
    /// let options = Inputs::new(x, x, x).alibi(&slopes).options();
    /// assert!(options.contains(&("alibi slopes", Datum::from(&slopes[..]))));
    /// assert!(options.contains(&("mask", Datum::default())));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn options(&self) -> Vec<(&'static str, Datum)> {
        let Self {
            bias,
            mask,
            period,
            alibi,
            sinks,
            kv_lens,
            ragged,
            sequences,
            row_positions,
            key_positions,
            selected,
            q: _,
            source: _,
        } = *self;
        let cover = |cover| match cover {
            Cover::AllKeys => "all keys",
            Cover::FirstKeys => "first keys",
            Cover::LastKeys => "last keys",
        };
        let kind = |mask: Covered<Mask<'_>>| match mask.of {
            Mask::Keep(_) => "keys to keep",
            _ => "keys to drop",
        };
        vec![
            ("bias", bias.map(|bias| bias.of.dtype()).into()),
            ("bias columns", bias.map(|bias| bias.of.shape()[3]).into()),
            ("bias covers", bias.map(|bias| cover(bias.cover)).into()),
            ("mask", mask.map(kind).into()),
            ("mask columns", mask.map(|mask| mask.of.view().shape()[3]).into()),
            ("mask covers", mask.map(|mask| cover(mask.cover)).into()),
            ("batch period", period.into()),
            ("alibi slopes", alibi.into()),
            ("sinks", sinks.into()),
            ("kv_lens", kv_lens.into()),
            ("selected keys", selected.map(|_| "selected").into()),
            ("ragged q", ragged.map(|ragged| ragged.q).into()),
            ("ragged k", ragged.and_then(|ragged| ragged.k).into()),
            ("row positions", row_positions.into()),
            ("key positions", key_positions.into()),
            ("sequences", sequences.into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_kernels::{Precision, SelectedKeys, View, Window};

    /// Names of what differs.
    fn differing(a: Vec<(&'static str, Datum)>, b: Vec<(&'static str, Datum)>) -> Vec<&'static str> {
        a.into_iter().zip(b).filter(|(a, b)| a != b).map(|((name, _), _)| name).collect()
    }

    #[test]
    fn every_setting_is_compared() {
        let all = Attention::new().scale(-0.0).window(Window::inclusive(Some(3), Some(4))).dropout(0.5, 1, 2);
        let window = |left, right, first| all.window(Window::inclusive(left, right).keep_first(first));
        let aligned = |alignment| all.align(alignment);
        let others = [
            (all.scale(0.0), "scale"),
            (all.softcap(3.0), "softcap"),
            (all.causal(), "causal rule"),
            (window(None, Some(4), 0), "window left"),
            (window(Some(3), Some(5), 0), "window right"),
            (window(Some(3), Some(4), 1), "window keep_first"),
            (aligned(Alignment::TopLeft), "alignment"),
            (aligned(Alignment::BottomRight), "alignment"),
            (aligned(Alignment::Offset(-3)), "alignment"),
            (all.precision(Precision::Native), "precision"),
            (all.dropout(0.25, 1, 2), "dropout p"),
            (all.dropout(0.5, u64::MAX, 2), "dropout seed"),
            (all.dropout(0.5, 1, 3), "dropout offset"),
            (Attention { dropout_from: [0, 7], ..all }, "first row and key of dropout"),
        ];
        for (other, name) in others {
            assert_eq!(differing(all.settings(), other.settings()), [name]);
            assert_eq!(differing(other.settings(), other.settings()), [""; 0]);
        }
        let named = others.map(|(_, name)| name);
        assert!(all.settings().iter().all(|(name, _)| named.contains(name)), "a setting is not tested");
    }

    #[test]
    fn every_option_is_compared() {
        let (x, marks, positions) = ([0.5f32; 16], [1u8; 2], [&[3, 4][..]]);
        let view = |columns| View::bhld(&x[..columns], [1, 1, 1, columns]).expect("a view");
        let mask = |columns| View::bhld(&marks[..columns], [1, 1, 1, columns]).expect("a view");
        let q = View::bhld(&x, [1, 1, 2, 8]).expect("a view");
        let none = Inputs::new(q, q, q);
        let all = none.bias(view(2)).mask(Mask::keep(mask(2)));
        let selected = SelectedKeys::new();
        let others = [
            (all.bias(view(1)), vec!["bias columns"]),
            (all.bias_suffix(view(2)), vec!["bias covers"]),
            (Inputs { bias: None, ..all }, vec!["bias", "bias columns", "bias covers"]),
            (all.mask(Mask::drop(mask(2))), vec!["mask"]),
            (all.mask(Mask::keep(mask(1))), vec!["mask columns"]),
            (all.mask_prefix(Mask::keep(mask(2))), vec!["mask covers"]),
            (all.batch_period(1), vec!["batch period"]),
            (all.alibi(&x), vec!["alibi slopes"]),
            (all.sinks(&[]), vec!["sinks"]),
            (all.kv_lens(&[1]), vec!["kv_lens"]),
            (all.ragged_queries(&[0, 2]), vec!["ragged q"]),
            (all.ragged(&[0, 2], &[0, 2]), vec!["ragged q", "ragged k"]),
            (all.row_positions(&positions), vec!["row positions"]),
            (all.key_positions(&positions), vec!["key positions"]),
            (all.sequences(&[0]), vec!["sequences"]),
            (all.selected(&selected), vec!["selected keys"]),
        ];
        for (other, names) in &others {
            assert_eq!(&differing(all.options(), other.options()), names);
        }
        let named: Vec<_> = others.into_iter().flat_map(|(_, names)| names).collect();
        assert!(all.options().iter().all(|(name, _)| named.contains(name)), "an option is not tested");
    }
}
