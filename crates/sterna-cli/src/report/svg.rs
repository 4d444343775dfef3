//! SVG elements as text. All text from a record is escaped.

use std::fmt::Write;

/// Escapes text for content and for attributes in double quotes.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // Control characters are not allowed in HTML.
            c if c.is_control() && c != '\n' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// An `<svg>` of fixed size in its own units. The page scales it to the available width.
pub struct Svg {
    text: String,
}

impl Svg {
    /// Begins a picture for the page; screen readers read `label`.
    pub fn new(width: f64, height: f64, label: &str) -> Self {
        Self {
            text: format!(
                "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n",
                escape(label)
            ),
        }
    }

    /// Begins a picture that is a file of its own and contains the page's styles.
    pub fn file(width: f64, height: f64, label: &str, style: &str) -> Self {
        Self {
            text: format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
                 aria-label=\"{}\">\n<style>\n{style}svg {{ background: var(--card); }}\n</style>\n",
                escape(label)
            ),
        }
    }

    /// Draws a rectangle with a tooltip; nothing if its size is zero.
    pub fn rect(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64, tip: &str) {
        if width > 0.0 && height > 0.0 {
            let _ = write!(
                self.text,
                "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\">"
            );
            self.tip(tip);
            self.text.push_str("</rect>\n");
        }
    }

    /// Draws a straight line.
    pub fn line(&mut self, class: &str, x1: f64, y1: f64, x2: f64, y2: f64) {
        let _ = writeln!(
            self.text,
            "<line class=\"{class}\" x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\"/>"
        );
    }

    /// Draws a path through `points`. With `base`, it is closed along that height.
    pub fn path(&mut self, class: &str, points: &[(f64, f64)], base: Option<f64>) {
        let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
        let _ = write!(self.text, "<path class=\"{class}\" d=\"");
        if let Some(base) = base {
            let _ = write!(self.text, "M{:.2} {base:.2}L{:.2} {:.2}", first.0, first.0, first.1);
        } else {
            let _ = write!(self.text, "M{:.2} {:.2}", first.0, first.1);
        }
        for (x, y) in &points[1..] {
            let _ = write!(self.text, "L{x:.2} {y:.2}");
        }
        if let Some(base) = base {
            let _ = write!(self.text, "L{:.2} {base:.2}Z", last.0);
        }
        self.text.push_str("\"></path>\n");
    }

    /// Draws text at `x`; the class decides its alignment.
    pub fn text(&mut self, class: &str, x: f64, y: f64, words: &str) {
        let _ =
            writeln!(self.text, "<text class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\">{}</text>", escape(words));
    }

    /// Ends the element and returns its text.
    pub fn finish(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }

    fn tip(&mut self, tip: &str) {
        if !tip.is_empty() {
            let _ = write!(self.text, "<title>{}</title>", escape(tip));
        }
    }
}
