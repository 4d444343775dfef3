//! Checks an image in mapped-ram form.

use super::{blocks, container, content, head, judge, places, tail};
use crate::ImageError;
use crate::format::Form;
use crate::tools::verify::report::{Report, VerifyOptions};
use crate::tools::verify::window::Window;

/// The parts of a mapped-ram image that a verification reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    /// Every byte of data.
    All,
    /// Everything except the pages, unless bitmaps and holes show a problem there.
    Structure,
}

pub(super) fn examine_mapped(
    window: &Window<'_>,
    front: &container::Front,
    options: &VerifyOptions,
    depth: Depth,
    report: &mut Report,
) -> Result<(), ImageError> {
    report.verdict.kind = front.format.in_form(Form::Mapped).to_string();
    let Some(head) = head::examine(window, front.stream_offset, report)? else {
        return if depth == Depth::All { content::read_all(window, options, report) } else { Ok(()) };
    };
    report.verdict.machine_type = head.machine_type.clone();
    let mut list = blocks::examine(window, &head, report)?;
    report.verdict.ram_bytes =
        list.blocks.iter().fold(0, |sum: u64, block| sum.saturating_add(block.length_bytes));
    places::examine(window, &head, &mut list, report);
    let tail = tail::examine(window, &head, &list, report)?;
    let bitmaps = places::bitmaps(window, &list, report)?;
    if depth == Depth::Structure && !judge::is_suspect(window, &list, &bitmaps, &tail) {
        return Ok(());
    }
    let content = content::examine(window, &list, options, report)?;
    judge::judge(window, &list, &bitmaps, &content, &tail, report);
    if options.digest && report.is_sound() {
        report.verdict.digest = Some(content::digest(window, &list, &bitmaps, options)?);
    }
    Ok(())
}
