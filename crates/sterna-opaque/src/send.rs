//! Sends a machine from an image to an address.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna::SettingsError;
use sterna::StartError;
use sterna::error::MigrationError;
use sterna::events::Observer;
use sterna::internals::flushes_silently;
use sterna::outgoing::Migration;
use sterna::params::{Capabilities, Parameters};
use sterna::{SystemRefusal, UnusableImage};
use sterna_image::tools::verify::refuse_damage;
use sterna_image::{Image, ImageError};
use sterna_transport::{Address, OpenOptions, PageFile};

use super::failure::image_failed;
use super::stored::stored_machine;

/// Options for sending an image, in addition to the parameters of every migration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SendOptions {
    /// The VM's UUID at the destination (QMP's `query-uuid`). With multifd both sides must have the same UUID, and an
    /// image contains it only with `validate-uuid`. `None`: the image's UUID, if any.
    pub uuid: Option<[u8; 16]>,
    /// Options for reading the pages: direct I/O.
    pub file: OpenOptions,
    /// Directory for a temporary copy of an image whose pages have no fixed places. Such images (legacy streams,
    /// compressed images) are decompressed to an unlinked, sparse file. `None`: the image's directory.
    pub spool: Option<PathBuf>,
    /// Whether a damaged image is sent, as far as it can be read. Damaged parts are sent unchanged; a description
    /// that is cut off is omitted.
    pub force_damaged: bool,
}

/// Sends the machine in `image` to `to`. Returns immediately; the handle is an ordinary [`Migration`].
///
/// The destination is a QEMU that waits with `-incoming`, with the same machine, devices and RAM, or a Sterna.
///
/// For the migration, the guest is paused. It runs at the destination if it ran when it was saved. The image stays
/// unchanged.
///
/// # Errors
/// - [`StartError::Settings`]: parameters exclude each other, or multifd cannot serve the machine type.
/// - [`StartError::Image`]: the image is cut off or has no bitmaps.
/// - [`StartError::DamagedImage`]: [`structure`](sterna_image::tools::verify::structure) finds damage in the image.
/// - [`StartError::System`]: the file cannot be read.
pub fn send(
    image: Image,
    to: &Address,
    options: &SendOptions,
    params: Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Result<Migration, StartError> {
    let machine_type = &image.shape().configuration.machine_type;
    if capabilities.multifd && flushes_silently(machine_type) {
        return Err(SettingsError::FlushesSilently { machine_type: machine_type.clone() }.into());
    }
    if !image.shape().has_eof {
        return Err(UnusableImage::CutOff { image: image.path_name().to_owned() }.into());
    }
    if image.lacks_bitmaps() {
        return Err(UnusableImage::NoBitmaps { image: image.path_name().to_owned() }.into());
    }
    if !options.force_damaged {
        refuse_damage(&image).map_err(|error| match error {
            ImageError::Damaged { .. } => StartError::DamagedImage(Arc::new(error)),
            error => SystemRefusal::Image(Arc::new(error)).into(),
        })?;
    }
    let (image, file) = open(image, options).map_err(StartError::system)?;
    let machine = stored_machine(Arc::new(image), file, options.uuid).map_err(StartError::system)?;
    // Each page is read once and sent once, and no running guest waits. So there is nothing to optimize for the
    // downtime.
    Migration::begin(Arc::new(machine), to, params, capabilities, observer)
}

/// Opens the image with pages at fixed places, and its file for reading the pages.
fn open(image: Image, options: &SendOptions) -> Result<(Image, PageFile), MigrationError> {
    let image = if image.mapped().is_some() {
        image
    } else {
        let beside = Path::new(image.path_name()).parent().map(Path::to_owned).unwrap_or_default();
        let directory = options.spool.clone().unwrap_or(beside);
        image.spool(&directory).map_err(image_failed)?
    };
    let file = image.mapped().and_then(|pages| pages.source().file());
    let Some(file) = file else {
        let what = format!("{}: pages can be sent from files only", image.path_name());
        return Err(MigrationError::System(what, None));
    };
    // Opened again through the descriptor, because the path may name another file by now, or none.
    let file =
        PageFile::open_again(file, image.path_name(), options.file).map_err(MigrationError::storage)?;
    Ok((image, file))
}
