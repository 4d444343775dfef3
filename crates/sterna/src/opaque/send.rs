//! An image goes out to an address.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_image::tools::verify::refuse_damage;
use sterna_image::{Image, ImageError};
use sterna_transport::{Address, OpenOptions, PageFile};

use super::stored::stored_machine;
use crate::error::MigrationError;
use crate::events::Observer;
use crate::machine_type::flushes_silently;
use crate::outgoing::Migration;
use crate::params::{Capabilities, Parameters};
use crate::settings_error::SettingsError;
use crate::start_error::StartError;

/// How an image is sent, besides the parameters of every migration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SendOptions {
    /// The VM's UUID as the destination has it (QMP's `query-uuid`): with multifd it must be equal, and an image
    /// states it only with `validate-uuid`. `None`: that of the image, or none.
    pub uuid: Option<[u8; 16]>,
    /// How the pages are read: direct I/O.
    pub file: OpenOptions,
    /// Where an image whose pages have no fixed places (a legacy stream, a compressed one) is decompressed to: an
    /// unlinked, sparse file. `None`: beside the image.
    pub spool: Option<PathBuf>,
    /// Send an image that is damaged, too, as far as it can be read. What is damaged goes as it is; a description that is
    /// cut off is left out.
    pub force_damaged: bool,
}

/// Sends the machine in `image` to `to`: a QEMU that waits with `-incoming`, with the same machine, devices and RAM,
/// or a Sterna. Returns at once; the handle is that of any [`Migration`].
///
/// The guest is paused as far as the migration goes; it runs at the destination if it ran when it was saved. The
/// image is left as it is.
///
/// # Errors
/// [`StartError::Settings`] for parameters that do not go together, or a machine type that multifd cannot serve;
/// [`StartError::Image`] for an image that is torn or has no bitmaps; [`StartError::DamagedImage`] for one in which
/// [`structure`](sterna_image::tools::verify::structure) finds damage; [`StartError::System`] for a file that cannot be
/// read.
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
        return Err(StartError::Image(format!(
            "{} ends inside the devices' state: it cannot be restored",
            image.path_name()
        )));
    }
    if image.lacks_bitmaps() {
        return Err(StartError::Image(format!(
            "{} is a background snapshot whose bitmaps were never written; all of RAM would be zero: \
             `sterna repair` mends it",
            image.path_name()
        )));
    }
    let system = |error: &dyn std::fmt::Display| StartError::System(error.to_string());
    if !options.force_damaged {
        refuse_damage(&image).map_err(|error| match error {
            ImageError::Damaged { .. } => StartError::DamagedImage(error.to_string()),
            error => system(&error),
        })?;
    }
    let (image, file) = open(image, options).map_err(|error| system(&error))?;
    let machine = stored_machine(Arc::new(image), file, options.uuid).map_err(|error| system(&error))?;
    // Pages are read once and sent once: nothing to be gained by looking at them with the guest's downtime in mind.
    Migration::begin(Arc::new(machine), to, params, capabilities, observer)
}

/// The image with its pages at fixed places, and its file for reading them.
fn open(image: Image, options: &SendOptions) -> Result<(Image, PageFile), MigrationError> {
    let image = if image.mapped().is_some() {
        image
    } else {
        let beside = Path::new(image.path_name()).parent().map(Path::to_owned).unwrap_or_default();
        let directory = options.spool.clone().unwrap_or(beside);
        image.spool(&directory)?
    };
    let file = image.mapped().and_then(|pages| pages.source().file());
    let Some(file) = file else {
        let what = format!("{}: pages can be sent from files only", image.path_name());
        return Err(MigrationError::System(what));
    };
    // By the descriptor: the name may be another's by now, or have gone.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let file = PageFile::open(name, options.file).map_err(MigrationError::storage)?;
    Ok((image, file))
}
