//! `sterna diff`: compares two images.

use std::path::{Path, PathBuf};

use serde_json::json;
use sterna_image::tools::diff::{BlockDifference, DiffOptions, Difference, SectionDifference, diff};
use sterna_image::tools::spool;
use sterna_image::{Access, Image, StoredImage};

use super::verify::{stop, warn_of_damage};
use crate::exit::{Done, Status, Stop};
use crate::frames::Opened;
use crate::storage::Storage;
use crate::{terminal, units};

/// Which images.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 equal; 1 different; 2 the images could not be compared. An image and its conversion to another format are equal.")]
pub struct Arguments {
    /// First image
    pub a: PathBuf,
    /// Second image
    pub b: PathBuf,
    /// How images in Sterna's own format are read.
    #[command(flatten)]
    pub opened: Opened,
    /// Write the second image as a layer over the first, in place of a comparison. The first is in Sterna's own format
    #[arg(long, value_name = "LAYER", conflicts_with = "json")]
    pub output: Option<PathBuf>,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Number of page ranges to list for each block
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub ranges: usize,
    /// Directory for temporary copies of images that are not mapped-ram [default: $TMPDIR or /var/tmp]
    #[arg(long, value_name = "DIR")]
    pub spool: Option<PathBuf>,
}

/// Compares the images and prints the differences.
pub fn execute(arguments: &Arguments) -> Done {
    if let Some(output) = &arguments.output {
        return super::layers::layer(&arguments.b, &arguments.a, output, &arguments.opened);
    }
    let open = |path| Image::open_with(path, &access_of(path, arguments)?).map_err(stop);
    let (a, b) = (open(&arguments.a)?, open(&arguments.b)?);
    warn_of_damage(&a)?;
    warn_of_damage(&b)?;
    let directory = arguments.spool.clone().unwrap_or_else(spool::default_directory);
    let options = DiffOptions { ranges: arguments.ranges, ..DiffOptions::default() };
    let difference = diff(&a, &b, &directory, &options).map_err(stop)?;
    terminal::print(&if arguments.json { json(&difference)? } else { text(&difference) });
    Ok(if difference.is_same() { Status::Done } else { Status::Failed })
}

/// The key is for the images in Sterna's own format.
fn access_of(path: &Path, arguments: &Arguments) -> Result<Access, Stop> {
    let mut access = arguments.opened.access()?;
    let is_encrypted = StoredImage::is_encrypted_at(path).unwrap_or(false);
    access.key = access.key.filter(|_| is_encrypted);
    Ok(access)
}

fn json(difference: &Difference) -> Result<String, Stop> {
    let value = json!({
        "schema": "sterna-diff",
        "version": 1,
        "same": difference.is_same(),
        "difference": difference,
    });
    serde_json::to_string_pretty(&value).map_err(|error| Stop::failed(error.to_string()))
}

fn text(difference: &Difference) -> String {
    let mut text = String::new();
    for pair in &difference.configuration {
        text += &format!("{}: {} | {}\n", pair.what, or_none(&pair.a), or_none(&pair.b));
    }
    difference.blocks.iter().for_each(|block| text += &block_text(block));
    difference.sections.iter().for_each(|section| text += &section_text(section));
    if difference.description {
        text += "the descriptions list different devices or fields\n";
    }
    let pages = units::count(difference.compared_pages);
    let [a, b] = &difference.kinds;
    let word = if difference.is_same() { "the same" } else { "different" };
    text + &format!("{}: {a} and {b}, {pages} pages compared", terminal::verdict(difference.is_same(), word))
}

fn block_text(block: &BlockDifference) -> String {
    let name = &block.name;
    match (block.length_bytes, &block.not_compared) {
        ([Some(a), None], _) => format!("block {name}: only in the first, {}\n", units::bytes(a)),
        ([None, Some(b)], _) => format!("block {name}: only in the second, {}\n", units::bytes(b)),
        ([Some(a), Some(b)], Some(why)) if a != b => {
            format!("block {name}: {why}; lengths {} | {}\n", units::bytes(a), units::bytes(b))
        }
        (_, Some(why)) => format!("block {name}: {why}\n"),
        ([a, b], None) => {
            let mut text = format!("block {name}: {} pages differ", units::count(block.pages));
            if let (Some(a), Some(b)) = (a, b)
                && a != b
            {
                text += &format!(", lengths {} | {}", units::bytes(a), units::bytes(b));
            }
            let page = |page: u64| format!("{:#x}", page * units::PAGE_BYTES);
            let ranges: Vec<_> = block
                .ranges
                .iter()
                .map(|(first, count)| format!("{} to {}", page(*first), page(first + count)))
                .collect();
            if !ranges.is_empty() {
                let rest = block.range_count - ranges.len() as u64;
                let more =
                    if rest > 0 { format!(" and {} more ranges", units::count(rest)) } else { String::new() };
                text += &format!(": {}{more}", ranges.join(", "));
            }
            text + "\n"
        }
    }
}

fn section_text(section: &SectionDifference) -> String {
    let head = format!("device {} {}", section.name, section.instance);
    match section.bytes {
        [Some(bytes), None] => return format!("{head}: only in the first, {bytes} bytes\n"),
        [None, Some(bytes)] => return format!("{head}: only in the second, {bytes} bytes\n"),
        _ => {}
    }
    let mut text = format!("{head}: {} bytes differ", section.differing_bytes);
    if let ([Some(a), Some(b)], true) = (section.bytes, section.bytes[0] != section.bytes[1]) {
        text += &format!(", lengths {a} | {b}");
    }
    if let ([Some(a), Some(b)], true) = (section.versions, section.versions[0] != section.versions[1]) {
        text += &format!(", versions {a} | {b}");
    }
    text += "\n";
    for field in &section.fields {
        text += &format!("    {}: {} | {}\n", field.what, field.a, field.b);
    }
    if section.has_more {
        text += "    and more fields\n";
    }
    text
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}
