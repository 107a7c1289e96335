//! Puts small faults into Rust sources, as cargo-mutants does, but each behind a condition, so that one build has them all:
//! `mutations PATH_OF_MUTANT FIRST_NUMBER FILE...` changes the files, and prints a line for each fault: its number, where it is,
//! and what.
//!
//! | what stands there | what takes its place |
//! |---|---|
//! | `<`, `<=`, `>`, `>=`, `==`, `!=` | with or without equality; the opposite |
//! | `&&`, `\|\|` | the other |
//! | `+`, `-`, `*`, `/`, `%` | `-`, `+`, `+`, `*`, `/` |
//! | `!x` | `x` |
//! | `.min(x)`, `.max(x)` | the other |
//! | body of a function that returns a bool, an option, a count, or a result without a value | `true`, `false`; `None`; 0; `Ok(())` |
//!
//! Constants, tests, macros and functions that compilers may run are left as they are, and so are faults that are there already.

use proc_macro2::{LineColumn, Span};
use std::fmt::Write as _;
use std::ops::Range;
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr, ImplItemFn, ItemFn, ReturnType, Signature, UnOp};

/// Text that goes in at a place in a source.
struct Insertion {
    at: usize,
    text: String,
}

/// Faults of a file.
struct Faults<'a> {
    source: &'a str,
    /// Where each line begins.
    lines: Vec<usize>,
    /// Path of the function that says which fault is on.
    path: &'a str,
    next: usize,
    insertions: Vec<Insertion>,
    said: String,
}

impl<'a> Faults<'a> {
    fn new(source: &'a str, path: &'a str, next: usize) -> Self {
        let lines = [0].into_iter().chain(source.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { source, lines, path, next, insertions: Vec::new(), said: String::new() }
    }

    /// Offset of a place, whose column counts characters.
    fn offset(&self, LineColumn { line, column }: LineColumn) -> usize {
        let first = self.lines[line - 1];
        self.source[first..].char_indices().nth(column).map_or(self.source.len(), |(at, _)| first + at)
    }

    fn range(&self, span: Span) -> Range<usize> {
        self.offset(span.start())..self.offset(span.end())
    }

    fn number(&mut self, span: Span, what: &str) -> usize {
        let number = self.next;
        self.next += 1;
        writeln!(self.said, "{number}\t{}\t{what}", span.start().line).expect("a string");
        number
    }

    /// Puts another expression in place of one, whose parts keep their own faults.
    fn replace(&mut self, span: Span, instead: &str, what: &str) {
        let number = self.number(span, what);
        let Range { start, end } = self.range(span);
        let text = format!("(if {}::is({number}) {{ {instead} }} else {{ ", self.path);
        self.insertions.push(Insertion { at: start, text });
        // Before the ends of expressions around this one.
        self.insertions.push(Insertion { at: end, text: " })".to_owned() });
    }

    /// Puts values in place of what a function returns.
    fn return_early(&mut self, signature: &Signature, block: &syn::Block) {
        let ReturnType::Type(_, of) = &signature.output else { return };
        let of: String = self.source[self.range(of.span())].split_whitespace().collect();
        let instead: &[&str] = match &*of {
            "bool" => &["true", "false"],
            "usize" => &["0"],
            _ if of.starts_with("Option<") => &["None"],
            _ if of.starts_with("Result<(),") => &["Ok(())"],
            _ => return,
        };
        for value in instead {
            let number = self.number(signature.ident.span(), &format!("{} returns {value}", signature.ident));
            let at = self.range(block.span()).start + 1;
            let text = format!(" if {}::is({number}) {{ return {value}; }} ", self.path);
            self.insertions.push(Insertion { at, text });
        }
    }

    /// Returns what stands beside a fault that is in the source already.
    fn beside_a_fault<'e>(&self, expr: &'e Expr) -> Option<&'e Expr> {
        let Expr::If(choice) = expr else { return None };
        let condition = &self.source[self.range(choice.cond.span())];
        condition.starts_with(self.path).then(|| choice.else_branch.as_ref().map(|(_, rest)| &**rest))?
    }

    /// Returns the source with its faults.
    fn finish(mut self) -> (String, usize, String) {
        // In the order of the source; at one place in the order of the visit, which is outer expressions first where they begin,
        // and, since an end is put in together with its beginning, the other way round where they end.
        let (mut text, mut from) = (String::new(), 0);
        let ends = |insertion: &Insertion| insertion.text == " })";
        let mut order: Vec<usize> = (0..self.insertions.len()).collect();
        order.sort_by_key(|&i| {
            let insertion = &self.insertions[i];
            // What ends here ends before what begins here.
            (insertion.at, !ends(insertion), i)
        });
        for i in order {
            let Insertion { at, text: inserted } = &mut self.insertions[i];
            text += &self.source[from..*at];
            text += inserted;
            from = *at;
        }
        text += &self.source[from..];
        (text, self.next, self.said)
    }
}

/// Whether an item is compiled for tests alone.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg") && {
                let text = attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default();
                text.starts_with("test")
            }
    })
}

impl<'ast> Visit<'ast> for Faults<'_> {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        if function.sig.constness.is_none() && !is_test(&function.attrs) {
            self.return_early(&function.sig, &function.block);
            visit::visit_block(self, &function.block);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if function.sig.constness.is_none() {
            self.return_early(&function.sig, &function.block);
            visit::visit_block(self, &function.block);
        }
    }

    // What compilers compute, and what is no expression.
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_expr_repeat(&mut self, repeat: &'ast syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_pat(&mut self, _: &'ast syn::Pat) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
    fn visit_generics(&mut self, _: &'ast syn::Generics) {}
    fn visit_angle_bracketed_generic_arguments(&mut self, _: &'ast syn::AngleBracketedGenericArguments) {}

    fn visit_expr(&mut self, expr: &'ast Expr) {
        if let Some(rest) = self.beside_a_fault(expr) {
            return self.visit_expr(rest);
        }
        match expr {
            // Conditions with patterns are no values.
            Expr::Binary(binary) if has_let(&binary.left) || has_let(&binary.right) => {}
            Expr::Binary(binary) => {
                if let Some(other) = other(&binary.op) {
                    let [left, right] = [&binary.left, &binary.right].map(|side| &self.source[self.range(side.span())]);
                    let what = format!("{} for {}", other, &self.source[self.range(binary.op.span())]);
                    self.replace(expr.span(), &format!("{left} {other} {right}"), &what);
                }
            }
            Expr::Unary(unary) if matches!(unary.op, UnOp::Not(_)) => {
                let operand = self.source[self.range(unary.expr.span())].to_owned();
                self.replace(expr.span(), &operand, "no !");
            }
            Expr::MethodCall(call) if call.args.len() == 1 && (call.method == "min" || call.method == "max") => {
                let other = if call.method == "min" { "max" } else { "min" };
                let [receiver, argument] =
                    [call.receiver.span(), call.args[0].span()].map(|span| &self.source[self.range(span)]);
                let what = format!("{other} for {}", call.method);
                self.replace(expr.span(), &format!("{receiver}.{other}({argument})"), &what);
            }
            _ => {}
        }
        visit::visit_expr(self, expr);
    }
}

fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

fn other(op: &BinOp) -> Option<&'static str> {
    Some(match op {
        BinOp::Lt(_) => "<=",
        BinOp::Le(_) => "<",
        BinOp::Gt(_) => ">=",
        BinOp::Ge(_) => ">",
        BinOp::Eq(_) => "!=",
        BinOp::Ne(_) => "==",
        BinOp::And(_) => "||",
        BinOp::Or(_) => "&&",
        BinOp::Add(_) => "-",
        BinOp::Sub(_) | BinOp::Mul(_) => "+",
        BinOp::Div(_) => "*",
        BinOp::Rem(_) => "/",
        _ => return None,
    })
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (path, first) = (args.next().expect("a path"), args.next().expect("a number"));
    let mut next: usize = first.parse().expect("a number");
    for file in args {
        let source = std::fs::read_to_string(&file).expect("a source");
        let parsed = syn::parse_file(&source).expect("Rust");
        let mut faults = Faults::new(&source, &path, next);
        faults.visit_file(&parsed);
        let (text, after, said) = faults.finish();
        next = after;
        std::fs::write(&file, text).expect("the file can be written");
        said.lines().for_each(|line| println!("{file}\t{line}"));
    }
}
