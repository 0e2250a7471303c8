//! Pictures, as SVG on a white ground: they look the same on a light page and on a dark one.

use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::report::{Axis, Plot};

/// Width and height in pixels.
const SIZE: (u32, u32) = (900, 460);

/// Colours that people who confuse red and green can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(70, 70, 70),
];

/// Why there is no picture.
pub(crate) type DrawingError = Box<dyn std::error::Error + Send + Sync>;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws one into a file.
pub(crate) fn draw(plot: &Plot, path: &Path) -> Result<(), DrawingError> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let points = || plot.lines.iter().flat_map(|line| &line.points);
    let x = bounds(points().map(|(x, _)| *x), &plot.x);
    let y = bounds(points().map(|(_, y)| *y), &plot.y);
    match (plot.x.logarithmic, plot.y.logarithmic) {
        (false, false) => lines(&area, plot, x.0..x.1, y.0..y.1),
        (true, false) => lines(&area, plot, (x.0..x.1).log_scale(), y.0..y.1),
        (false, true) => lines(&area, plot, x.0..x.1, (y.0..y.1).log_scale()),
        (true, true) => lines(&area, plot, (x.0..x.1).log_scale(), (y.0..y.1).log_scale()),
    }?;
    area.present()?;
    Ok(())
}

/// From where to where an axis goes: from zero, or between powers of ten.
fn bounds(values: impl Iterator<Item = f64>, axis: &Axis) -> (f64, f64) {
    let fit = |(least, most): (f64, f64), value: f64| (least.min(value), most.max(value));
    if axis.logarithmic {
        let (least, most) = values.filter(|value| *value > 0.0).fold((f64::MAX, f64::MIN_POSITIVE), fit);
        let least = 10f64.powf(least.min(most).log10().floor());
        (least, 10f64.powf(most.log10().ceil()).max(least * 10.0))
    } else {
        let (least, most) = values.fold((0.0, f64::MIN_POSITIVE), fit);
        (least, if axis.unit == lastgasp_tests::distribution::Unit::Percent { most } else { most * 1.05 })
    }
}

fn lines<X, Y>(area: &Area<'_>, plot: &Plot, x: X, y: Y) -> Result<(), DrawingError>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(area)
        .caption(&plot.title, ("sans-serif", 20))
        .margin(14)
        .margin_right(30)
        .x_label_area_size(48)
        .y_label_area_size(76)
        .build_cartesian_2d(x, y)?;
    let (along, up) = (|value: &f64| label(&plot.x, *value), |value: &f64| label(&plot.y, *value));
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc(&plot.x.title)
        .y_desc(&plot.y.title)
        .axis_desc_style(("sans-serif", 15))
        .label_style(("sans-serif", 13))
        .x_label_formatter(&along)
        .y_label_formatter(&up)
        .draw()?;
    for (line, colour) in plot.lines.iter().zip(COLOURS.iter().cycle()) {
        let style = colour.stroke_width(2);
        let points = line.points.iter().copied().filter(|(x, _)| !plot.x.logarithmic || *x > 0.0);
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 13))
        .draw()?;
    Ok(())
}

fn label(axis: &Axis, value: f64) -> String {
    use lastgasp_tests::distribution::Unit;
    match axis.unit {
        Unit::Percent => format!("{value} %"),
        unit => unit.show(value).replace(".00", "").replace(".0 ", " "),
    }
}
