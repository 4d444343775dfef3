//! What the engine does with a device's state.

use super::pipe::StatePipe;

/// What the engine does with the device.
#[derive(Debug, Default)]
pub(super) enum Transfer {
    #[default]
    None,
    /// It will be saved, but its rings run.
    Announced,
    /// It will go to another process with its back end, whose state stays where it is.
    HandingOver,
    /// The back end writes its state.
    Saving { pipe: StatePipe, bytes: u64 },
    /// All was read, and the back end says that it was all.
    Saved,
    /// The save went wrong or is not wanted any more.
    Unsaved,
    /// Its rings ran on in the middle of the save: what was read is of a device that is no more.
    Interrupted,
    /// The back end reads its state.
    Loading(StatePipe),
    /// The back end has no state: only a record of its rings comes.
    LoadingNothing,
    /// The state is in the back end's hands, but nobody has said that it is good.
    Unchecked,
    /// All is loaded.
    Loaded,
    /// It ran with what was loaded, and no save has begun since.
    Ran {
        /// It was told to stop since, so the load may yet be undone.
        stopped: bool,
    },
}

impl Transfer {
    pub(super) fn describe(&self) -> &'static str {
        match self {
            Self::None | Self::Ran { .. } => "its state is not being transferred",
            Self::Announced | Self::Saving { .. } | Self::Saved => "its state is being saved",
            Self::HandingOver => "its back end is being handed over",
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

    /// A guest that has arrived paused is all there, and may leave before it has run.
    pub(super) fn is_load_under_way(&self) -> bool {
        matches!(self, Self::Loading(_) | Self::LoadingNothing | Self::Unchecked)
    }
}
