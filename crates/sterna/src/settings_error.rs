//! Settings that make no sense, or come at the wrong time.

/// Why settings are refused. Names are those of the fields of [`Parameters`](crate::Parameters) and
/// [`Capabilities`](crate::Capabilities).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// Settings that are fixed when a migration starts were to change while it runs. Nothing was changed.
    #[error("{} cannot change while the migration runs: set them for the next one", fields.join(", "))]
    NotLive {
        /// Which.
        fields: Vec<&'static str>,
    },
}
