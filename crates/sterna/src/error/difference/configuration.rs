//! A destination that makes its VM from the source's configuration.

use crate::settings_error::SettingsError;

/// Why a destination that has no VM yet does not take a source's configuration, or gets none.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigurationDifference {
    /// The destination does not accept a setting of the source.
    #[error(
        "{setting} is {} at the source, and the destination accepts {limit}: change it at one of the sides",
        value.as_deref().unwrap_or("off")
    )]
    Setting {
        /// Name of the setting, as in QEMU's monitor.
        setting: String,
        /// Its value at the source; `None` if it is off there.
        value: Option<String>,
        /// The accepted values, as text.
        limit: String,
    },
    /// The settings that would result at the destination exclude each other, or do not fit its address.
    #[error("with the source's settings this side cannot receive the guest: {0}")]
    Excluded(#[source] SettingsError),
    /// The source sends no configuration, and this side has no VM without one.
    #[error(
        "{peer}: the source sent no configuration, and this side makes its VM from one: the source must be a Sterna \
         that knows of this, with the return path on; otherwise make the VM first and listen with it"
    )]
    NoneSent {
        /// Address of the source.
        peer: String,
    },
    /// The destination asks for a configuration, and the VM of this side has none.
    #[error(
        "the destination makes its VM from the source's configuration, and this VM gives none \
         (SourceVm::configuration): let the destination make the VM first and listen with it"
    )]
    NoneHere,
    /// Another source's configuration was taken before.
    #[error("{peer}: this side has made its VM for another source, which was first: use another address")]
    Taken {
        /// Address of the source that is refused.
        peer: String,
    },
}
