//! The progress of the engine's transfer of a device's state.

use super::pipe::StatePipe;

/// Stage of the transfer.
#[derive(Debug, Default)]
pub(super) enum Transfer {
    #[default]
    None,
    /// A save was announced, and the rings still run.
    Announced,
    /// The device will be handed over with its back end, which keeps its state.
    HandingOver,
    /// The back end writes its state to the pipe.
    Saving { pipe: StatePipe, bytes: u64 },
    /// The state was read to its end, and the back end has confirmed it.
    Saved,
    /// The save failed or was aborted.
    Unsaved,
    /// The rings ran during the save, so the bytes read belong to an outdated state.
    Interrupted,
    /// The back end reads its state from the pipe.
    Loading(StatePipe),
    /// The back end has no state, and only the record of the rings is loaded.
    LoadingNothing,
    /// The back end has received the whole state and has not confirmed it yet.
    Unchecked,
    /// State and record are loaded.
    Loaded,
    /// The device ran with the loaded state, and no save has begun since.
    Ran {
        /// The device was stopped afterwards, so the load may still be undone.
        stopped: bool,
    },
}

impl Transfer {
    pub(super) fn describe(&self) -> &'static str {
        match self {
            Self::None | Self::Ran { .. } => "its state is not being transferred",
            Self::Announced | Self::Saving { .. } | Self::Saved => "its state is being saved",
            Self::HandingOver => "its back end is being passed on",
            Self::Unsaved => "saving its state has failed",
            Self::Interrupted => "an operator's stop and cont interrupted the save; migrate again",
            Self::Loading(_) | Self::LoadingNothing | Self::Unchecked | Self::Loaded => {
                "its state is being loaded"
            }
        }
    }

    pub(super) fn is_save(&self) -> bool {
        matches!(
            self,
            Self::Announced
                | Self::HandingOver
                | Self::Saving { .. }
                | Self::Saved
                | Self::Unsaved
                | Self::Interrupted
        )
    }

    /// Whether a load is incomplete. A guest that arrived paused is complete, and may be migrated again
    /// before it has run.
    pub(super) fn is_load_under_way(&self) -> bool {
        matches!(self, Self::Loading(_) | Self::LoadingNothing | Self::Unchecked)
    }
}
