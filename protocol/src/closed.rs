//! Enums of closed names: one name in logs, metrics, JSON and tests, derived from the variant by strum.

/// An enum with `#[derive(strum::IntoStaticStr)]`.
pub trait ClosedName {
    /// The variant's closed name.
    fn as_str(&self) -> &'static str;
}

impl<T> ClosedName for T
where
    for<'a> &'a T: Into<&'static str>,
{
    fn as_str(&self) -> &'static str {
        self.into()
    }
}
