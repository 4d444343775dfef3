//! Which boot sector makes a load.

use sterna_interop::Guest;

use crate::plan::Load;

/// The guest that makes such a load.
pub(crate) fn writer(load: Load) -> Guest {
    match load {
        Load::Upload | Load::Sparse => Guest::Ring,
        _ => Guest::Scattered,
    }
}
