//! `sterna rebase` and `sterna flatten`: change what an image in Sterna's own format is based on.

use std::path::{Path, PathBuf};

use sterna_image::convert::{ConvertOptions, Input, Output, convert, copy_image, directory_kind};
use sterna_image::{Access, Format, ImagePlace, open_frames, publish};

use crate::exit::{Done, Status, Stop};
use crate::frames::{Frames, Level, Opened, key, level};
use crate::interrupts::Interrupts;
use crate::storage::Storage;
use crate::{terminal, units};

/// A layer, and the base that it gets in place of its own.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The image's memory does not change. Its old base must be there, because pages are read from it. The image gets another digest: layers \
over it need a rebase, too.")]
pub struct Rebase {
    /// Image in Sterna's own format
    pub image: PathBuf,
    /// Image that becomes its base
    pub base: PathBuf,
    /// Where the result goes, and how it is compressed.
    #[command(flatten)]
    pub to: Target,
}

/// A layer that becomes a complete image.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The image's memory does not change. The result has all pages, and needs no other image. It gets another digest: layers over the image \
need a rebase.")]
pub struct Flatten {
    /// Layer in Sterna's own format
    pub image: PathBuf,
    /// Where the result goes, and how it is compressed.
    #[command(flatten)]
    pub to: Target,
}

/// Where the result goes, and how it is compressed. Without an output it replaces the image.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// Image to write [default: replace the image itself]
    #[arg(short, long, value_name = "IMAGE")]
    pub output: Option<PathBuf>,
    /// Replace the output if it exists
    #[arg(long, requires = "output")]
    pub force: bool,
    /// Compression level of zstd, 1 to 22; 0: none; auto: changes during the command, so that neither the disk nor the
    /// processors wait
    #[arg(long, default_value = "1", value_name = "N|auto", value_parser = level)]
    pub level: Level,
    /// Bytes of memory in a frame: a power of two from 64k to 2M
    #[arg(long, default_value = "64k", value_name = "SIZE", value_parser = units::parse_size)]
    pub extent: u64,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// File with the key of encrypted images
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Where the old base may be: an image, or a directory of images. Bases in the image's directory are found without
    #[arg(long, value_name = "PATH")]
    pub source_base: Vec<PathBuf>,
}

/// Writes the image as a layer over another base.
pub fn rebase(arguments: &Rebase) -> Done {
    write(&arguments.image, Some(&arguments.base), &arguments.to)
}

/// Writes the image with all pages of its bases.
pub fn flatten(arguments: &Flatten) -> Done {
    write(&arguments.image, None, &arguments.to)
}

/// Writes `image` to `output` as a layer over `base`. `opened` is for both images.
///
/// The settings of object storages are those that are installed already.
pub fn layer(image: &Path, base: &Path, output: &Path, opened: &Opened) -> Done {
    let to = Target {
        output: Some(output.to_owned()),
        force: false,
        level: Level::Fixed(1),
        extent: 64 << 10,
        storage: Storage::default(),
        key: opened.key.clone(),
        source_base: opened.base.clone(),
    };
    write(image, Some(base), &to)
}

fn write(image: &Path, base: Option<&Path>, to: &Target) -> Done {
    let key_of = to.key.as_deref().map(key).transpose()?;
    let frames =
        Frames { level: to.level, extent: to.extent, key: to.key.clone(), base: base.map(Path::to_owned) };
    let (target, is_itself) = match &to.output {
        Some(output) => (output.clone(), false),
        None if ImagePlace::is_elsewhere(image) => {
            let text =
                "an image in a store or an object storage is not replaced by itself: give --output IMAGE";
            return Err(Stop::usage(text));
        }
        None => (beside(image), true),
    };
    let options = ConvertOptions {
        target: Some(Format::Sterna),
        replace: to.force || is_itself,
        access: Access { key: key_of, bases: to.source_base.clone() },
        frames: frames.options()?,
        ..ConvertOptions::default()
    };
    Interrupts::remove_files()?;
    let stop = |error| Stop::of_image(&error, &[image]);
    if let Some(base) = base.filter(|_| is_itself) {
        let opened = open_frames(base, &options.access).map_err(stop)?;
        opened.map_or(Ok(()), |base| base.check_kept(image)).map_err(|error| stop(error.into()))?;
    }
    let bytes = match directory_kind(image, &options.access).map_err(stop)? {
        Some(_) => copy_image(image, &target, &options).map_err(stop)?.bytes,
        None => {
            let (from, to) = (Input::File(image.into()), Output::File(target.clone()));
            convert(from, to, &options).map_err(stop)?.target_bytes
        }
    };
    if is_itself {
        publish(&target, image, true).map_err(|error| stop(error.into()))?;
    }
    let shown = if is_itself { image } else { &target };
    terminal::note(&format!("wrote {}: {}", shown.display(), units::bytes(bytes)));
    Ok(Status::Done)
}

/// A name next to the image for its successor.
fn beside(image: &Path) -> PathBuf {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    image.with_file_name(format!(".{name}.{}.sterna-rebase", std::process::id()))
}
