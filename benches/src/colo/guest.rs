//! Selects the boot sector for a load.

use sterna_interop::Guest;

use crate::plan::Load;

/// The guest that produces this load.
pub(crate) fn writer(load: Load) -> Guest {
    match load {
        Load::Upload | Load::Sparse => Guest::Ring,
        _ => Guest::Scattered,
    }
}
