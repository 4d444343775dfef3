//! Which features of a migration this build of the engine has: each one is a Cargo feature.

use super::{Feature, Features};
use crate::settings_error::SettingsError;

/// A feature of a migration that a Cargo feature adds.
pub(super) struct Need {
    feature: Feature,
    /// The feature as settings and addresses name it.
    what: &'static str,
    cargo_feature: &'static str,
    is_on: bool,
}

macro_rules! needs {
    ($($feature:ident, $what:literal: $cargo:literal,)+) => {
        &[$(Need {
            feature: Feature::$feature,
            what: $what,
            cargo_feature: $cargo,
            is_on: cfg!(feature = $cargo),
        },)+]
    };
}

/// The features that are not in every build.
pub(super) static NEEDS: &[Need] = needs! {
    Rdma, "an address rdma:": "rdma",
    Tls, "tls": "tls",
    Compression, "multifd_compression": "multifd-compression",
    Postcopy, "postcopy_ram": "postcopy",
    Reconnect, "reconnect_window": "reconnect",
    Protection, "a standby": "standby",
};

/// Refuses the first of `features` that this build lacks.
pub(super) fn check(features: Features, needs: &[Need]) -> Result<(), SettingsError> {
    let missing = needs.iter().find(|need| !need.is_on && features.has(need.feature));
    missing.map_or(Ok(()), |need| {
        Err(SettingsError::NotCompiled { what: need.what, cargo_feature: need.cargo_feature })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_that_is_not_compiled_in_is_refused_by_the_name_of_its_cargo_feature() {
        for need in NEEDS {
            let Need { feature, what, cargo_feature, .. } = *need;
            let wanted = Features::default().with(feature, true);
            let off = [Need { feature, what, cargo_feature, is_on: false }];
            let refused = SettingsError::NotCompiled { what, cargo_feature };
            assert_eq!(check(wanted, &off), Err(refused));
            assert_eq!(check(Features::default(), &off), Ok(()));
            assert_eq!(check(wanted, &[Need { feature, what, cargo_feature, is_on: true }]), Ok(()));
        }
    }
}
